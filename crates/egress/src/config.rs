//! Configuration of the egress policy.

use std::str::FromStr;

use crate::{AllowRule, Policy};

/// Settings for calls to tenants' URLs.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct EgressConfig {
    /// Hosts, addresses and networks that tenants' URLs may lead to besides public addresses, separated by commas. For
    /// tests and private installations.
    #[arg(long = "egress-allow", env = "RELAY_EGRESS_ALLOW", default_value = "")]
    pub allow: AllowList,
    /// `on` requires https for tenants' URLs. Private addresses are refused either way.
    #[arg(long = "egress-strict", env = "RELAY_EGRESS_STRICT", value_enum, default_value_t = Switch::On)]
    pub strict: Switch,
}

impl EgressConfig {
    /// Returns the configured policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy { strict: self.strict == Switch::On, allow: self.allow.0.clone() }
    }
}

/// Boolean setting, `on` or `off`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// The setting is on.
    #[default]
    On,
    /// The setting is off.
    Off,
}

/// Allow rules, separated by commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList(pub Vec<AllowRule>);

impl FromStr for AllowList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty());
        Ok(Self(rules.map(str::parse).collect::<Result<_, _>>()?))
    }
}
