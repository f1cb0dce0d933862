//! Configuration of the egress policy.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use crate::{AllowRule, CallLimits, Client, Policy, SystemResolver};

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
    /// Name servers for the hosts of tenants' URLs, `address` or `address:port`, separated by commas. Those of the
    /// machine if empty.
    #[arg(long = "egress-name-servers", env = "RELAY_EGRESS_NAME_SERVERS", default_value = "")]
    pub name_servers: NameServers,
}

impl EgressConfig {
    /// Returns the configured policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy { strict: self.strict == Switch::On, allow: self.allow.0.clone() }
    }

    /// Creates the client for tenants' URLs.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(self.policy(), CallLimits::default(), SystemResolver::new(&self.name_servers.0))
    }
}

/// Boolean setting, `on` or `off`, of this crate and of programs that use it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    // No doc comments: clap would show them as help.
    #[default]
    On,
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

/// Addresses of name servers, separated by commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameServers(pub Vec<SocketAddr>);

impl FromStr for NameServers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let servers = text.split(',').map(str::trim).filter(|server| !server.is_empty()).map(|server| {
            let address = server.parse::<IpAddr>().map(|address| SocketAddr::new(address, 53));
            address.or_else(|_| server.parse()).map_err(|_| format!("\"{server}\" is not the address of a name server"))
        });
        Ok(Self(servers.collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_addresses_with_an_optional_port() {
        let servers: NameServers = "10.0.0.53, [::1]:5353,127.0.0.1:54".parse().unwrap();
        let texts: Vec<_> = servers.0.iter().map(SocketAddr::to_string).collect();
        assert_eq!(texts, ["10.0.0.53:53", "[::1]:5353", "127.0.0.1:54"]);
        assert_eq!("".parse(), Ok(NameServers::default()));
        assert!("dns.example".parse::<NameServers>().is_err());
    }
}
