//! What may be called: the public internet over TLS, and what the operator allows besides.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;

use crate::{
    address::{Reason, judge},
    target::{Refusal, Target},
};

/// Last parts of names that no public host has (RFC 6761, RFC 6762, RFC 8375, `.internal`, and what clusters use).
const PRIVATE_SUFFIXES: [&str; 10] =
    ["localhost", "localdomain", "local", "internal", "intranet", "lan", "home.arpa", "corp", "svc", "onion"];

/// Something that is allowed besides the public internet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowRule {
    /// A host by its name in lower case: whatever addresses it has, over http too.
    Host(String),
    /// Addresses: whatever name they are called by. Over http too if the URL names the address itself.
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
        match Target::read(&format!("https://{text}/")) {
            Ok(target) if text.eq_ignore_ascii_case(&target.host) => Ok(Self::Host(target.host)),
            _ => Err(format!("\"{text}\" is neither a host, an address nor a network")),
        }
    }
}

/// What may be called.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Whether only https may be spoken. Addresses are judged either way.
    pub strict: bool,
    /// What is allowed besides.
    pub allow: Vec<AllowRule>,
}

impl Default for Policy {
    /// As in production: https to public addresses.
    fn default() -> Self {
        Self { strict: true, allow: Vec::new() }
    }
}

impl Policy {
    /// Reads a URL and judges what can be seen of it without asking anybody: for the moment it is registered.
    ///
    /// # Errors
    /// When it would be refused whatever its host's name leads to.
    pub fn check_url(&self, url: &str) -> Result<Target, Refusal> {
        let mut target = Target::read(url)?;
        if self.names(&target.host) {
            target.is_vouched = true;
            return Ok(target);
        }
        match target.literal {
            Some(address) if self.covers(address) => return Ok(target),
            Some(address) => self.check_address(address)?,
            None if is_private_name(&target.host) && !self.covers_names_of_this_host(&target.host) => {
                return Err(Refusal::PrivateName);
            }
            None => {}
        }
        if self.strict && !target.is_https {
            return Err(Refusal::Scheme);
        }
        Ok(target)
    }

    /// A URL of the operator's own, such as a proxy: read strictly, judged no further.
    ///
    /// # Errors
    /// When it is no URL.
    pub fn vouch(&self, url: &str) -> Result<Target, Refusal> {
        Ok(Target { is_vouched: true, ..Target::read(url)? })
    }

    /// Judges one address.
    pub(crate) fn check_address(&self, address: IpAddr) -> Result<(), Refusal> {
        if self.covers(address) {
            return Ok(());
        }
        judge(address).map_or(Ok(()), |reason| Err(Refusal::Address(reason)))
    }

    /// Judges all addresses of a target: one that is refused spoils the others.
    pub(crate) fn check_addresses(&self, target: &Target, addresses: &[IpAddr]) -> Result<(), Refusal> {
        if target.is_vouched {
            return Ok(());
        }
        addresses.iter().try_for_each(|address| self.check_address(*address))
    }

    fn names(&self, host: &str) -> bool {
        self.allow.iter().any(|rule| matches!(rule, AllowRule::Host(name) if name == host))
    }

    fn covers(&self, address: IpAddr) -> bool {
        self.allow.iter().any(|rule| matches!(rule, AllowRule::Net(net) if net.contains(&address)))
    }

    /// `localhost` is an address of this machine by definition, so allowing those allows the name.
    fn covers_names_of_this_host(&self, host: &str) -> bool {
        let is_local = host == "localhost" || host.ends_with(".localhost");
        is_local
            && self
                .allow
                .iter()
                .any(|rule| matches!(rule, AllowRule::Net(net) if judge(net.network()) == Some(Reason::Loopback)))
    }
}

fn is_private_name(host: &str) -> bool {
    // A name without a dot is looked for in the domains of this machine.
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
    fn what_the_operator_allows_is_allowed_and_nothing_else() {
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
        assert_eq!(lenient.check_url("http://127.0.0.1/"), Err(Refusal::Address(Reason::Loopback)));
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
