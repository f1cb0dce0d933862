//! The policy as an operator writes it down.

use std::str::FromStr;

use crate::{AllowRule, Policy};

/// Which URLs of tenants are called.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct EgressConfig {
    /// Hosts, addresses and networks that tenants' URLs may lead to besides public addresses, separated by
    /// commas. For tests and private installations.
    #[arg(long = "egress-allow", env = "RELAY_EGRESS_ALLOW", default_value = "")]
    pub allow: AllowList,
    /// Whether tenants' URLs must be https. Private addresses are refused either way.
    #[arg(long = "egress-strict", env = "RELAY_EGRESS_STRICT", value_enum, default_value_t = Switch::On)]
    pub strict: Switch,
}

impl EgressConfig {
    /// The policy that is meant.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy { strict: self.strict == Switch::On, allow: self.allow.0.clone() }
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// On.
    #[default]
    On,
    /// Off.
    Off,
}

/// Rules, separated by commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList(pub Vec<AllowRule>);

impl FromStr for AllowList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty());
        Ok(Self(rules.map(str::parse).collect::<Result<_, _>>()?))
    }
}
