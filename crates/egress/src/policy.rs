//! Egress policy: the public internet over TLS, and exceptions allowed by the operator.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;

use crate::{
    address::{BlockedReason, blocked_reason},
    target::{Refusal, Target},
};

/// Suffixes of names without public hosts (RFC 6761, RFC 6762, RFC 8375, `.internal`, and cluster domains).
const PRIVATE_SUFFIXES: [&str; 10] =
    ["localhost", "localdomain", "local", "internal", "intranet", "lan", "home.arpa", "corp", "svc", "onion"];

/// Exception of the policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowRule {
    /// Host name in lower case: all its addresses, over http too.
    Host(String),
    /// Network: all host names that resolve into it. Over http too if the URL contains the address itself.
    Net(IpNet),
}

impl FromStr for AllowRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(net) = text.parse::<IpNet>() {
            return Ok(Self::Net(net));
        }
        if let Ok(address) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(Self::Net(address.into()));
        }
        match Target::parse(&format!("https://{text}/")) {
            // The host must be the whole text: a port or a path in a rule would be ignored silently.
            Ok(target) if text.eq_ignore_ascii_case(&target.host) => Ok(Self::Host(target.host)),
            _ => Err(format!("\"{text}\" is neither a host, an address nor a network")),
        }
    }
}

/// Rules for calls to tenants' URLs.
#[derive(Debug, Clone)]
pub struct Policy {
    /// `true` requires https. Addresses are checked either way.
    pub strict: bool,
    /// Exceptions allowed by the operator.
    pub allow: Vec<AllowRule>,
}

impl Default for Policy {
    /// Returns the policy for production: https to public addresses.
    fn default() -> Self {
        Self { strict: true, allow: Vec::new() }
    }
}

impl Policy {
    /// Parses a URL and checks it without resolving the host, as at registration.
    ///
    /// # Errors
    /// If the URL would be refused whatever addresses its host has.
    pub fn check_url(&self, url: &str) -> Result<Target, Refusal> {
        let mut target = Target::parse(url)?;
        if self.allows_host(&target.host) {
            target.is_trusted = true;
            return Ok(target);
        }
        match target.literal {
            // Before the scheme is checked: an allowed address may also be called over http.
            Some(address) if self.allows_address(address) => return Ok(target),
            Some(address) => self.check_address(address)?,
            None if is_private_name(&target.host) && !self.allows_loopback_name(&target.host) => {
                return Err(Refusal::PrivateName);
            }
            None => {}
        }
        if self.strict && !target.is_https {
            return Err(Refusal::Scheme);
        }
        Ok(target)
    }

    /// Parses a URL of the operator, such as a proxy, and exempts it from address checks.
    ///
    /// # Errors
    /// If the URL is malformed.
    pub fn trust_url(&self, url: &str) -> Result<Target, Refusal> {
        Ok(Target { is_trusted: true, ..Target::parse(url)? })
    }

    /// Checks one address.
    pub(crate) fn check_address(&self, address: IpAddr) -> Result<(), Refusal> {
        if self.allows_address(address) {
            return Ok(());
        }
        blocked_reason(address).map_or(Ok(()), |reason| Err(Refusal::Address(reason)))
    }

    /// Checks all addresses of a target. One blocked address refuses the whole target, because a connection might use
    /// it.
    pub(crate) fn check_addresses(&self, target: &Target, addresses: &[IpAddr]) -> Result<(), Refusal> {
        if target.is_trusted {
            return Ok(());
        }
        addresses.iter().try_for_each(|address| self.check_address(*address))
    }

    fn allows_host(&self, host: &str) -> bool {
        self.allow.iter().any(|rule| matches!(rule, AllowRule::Host(name) if name == host))
    }

    fn allows_address(&self, address: IpAddr) -> bool {
        self.allow.iter().any(|rule| matches!(rule, AllowRule::Net(net) if net.contains(&address)))
    }

    /// Returns whether `host` is a loopback name and loopback addresses are allowed.
    fn allows_loopback_name(&self, host: &str) -> bool {
        let is_local = host == "localhost" || host.ends_with(".localhost");
        is_local
            && self
                .allow
                .iter()
                .any(|rule| matches!(rule, AllowRule::Net(net) if blocked_reason(net.network()) == Some(BlockedReason::Loopback)))
    }
}

fn is_private_name(host: &str) -> bool {
    // The resolver looks names without a dot up in the machine's search domains.
    !host.contains('.')
        || PRIVATE_SUFFIXES
            .iter()
            .any(|suffix| host.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(strict: bool, allow: &[&str]) -> Policy {
        Policy { strict, allow: allow.iter().map(|rule| rule.parse().unwrap()).collect() }
    }

    #[test]
    fn only_exceptions_of_the_operator_are_allowed() {
        let private = policy(true, &["127.0.0.0/8", "::1", "hooks.corp", "10.1.2.3"]);
        for url in [
            "http://127.0.0.1:9/x",
            "https://127.9.9.9/",
            "http://[::1]:9/",
            "http://hooks.corp/",
            "https://10.1.2.3/",
            "http://10.1.2.3/",
            "https://public.example/",
            "https://localhost/",
        ] {
            assert!(private.check_url(url).is_ok(), "{url}");
        }
        for url in ["http://10.1.2.4/", "https://other.corp/", "https://hooks.corp.local/", "http://public.example/"] {
            assert!(private.check_url(url).is_err(), "{url}");
        }
        let lenient = policy(false, &[]);
        assert!(lenient.check_url("http://public.example/").is_ok());
        assert_eq!(lenient.check_url("http://127.0.0.1/"), Err(Refusal::Address(BlockedReason::Loopback)));
    }

    #[test]
    fn rules_are_hosts_addresses_and_networks() {
        assert_eq!("Hooks.Example".parse(), Ok(AllowRule::Host("hooks.example".into())));
        assert!(matches!("[::1]".parse(), Ok(AllowRule::Net(_))));
        for wrong in ["", "a b", "https://x", "x:1", "10.0.0.0/33", "user@x", "0x7f.1", "*.example"] {
            assert!(wrong.parse::<AllowRule>().is_err(), "{wrong}");
        }
    }
}
