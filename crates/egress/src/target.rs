//! Strict parsing of URLs. Texts that two parsers may interpret differently are refused.

use std::net::IpAddr;

use http::{HeaderValue, uri::PathAndQuery};
use url::{Host, Url};

use crate::address::BlockedReason;

/// Maximum length of a URL, in bytes.
pub(crate) const MAX_URL_BYTES: usize = 2048;
/// Maximum length of a host name, in bytes (RFC 1035).
const MAX_HOST_BYTES: usize = 253;
/// Maximum length of one label of a host name, in bytes.
const MAX_LABEL_BYTES: usize = 63;

/// Reason for refusing a URL. Reveals nothing about the internal network, so it may be shown to the owner of the URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Malformed, or longer than 2048 bytes.
    #[error("it is not an absolute URL of at most {MAX_URL_BYTES} bytes")]
    NotAUrl,
    /// Neither `https` nor, where allowed, `http`.
    #[error("its scheme must be https")]
    Scheme,
    /// Contains a user name or a password.
    #[error("it must not carry a user name or password")]
    Userinfo,
    /// Contains a host in a non-canonical spelling.
    #[error("its host must be a name in ASCII, or an address in its usual spelling")]
    Host,
    /// Contains an empty, zero, too large or non-canonical port.
    #[error("its port must be a number from 1 to 65535")]
    Port,
    /// Contains a host name of a private network.
    #[error("its host is a name of a private network")]
    PrivateName,
    /// Leads to an address outside the public internet.
    #[error("its host has {} address", .0.as_str())]
    Address(BlockedReason),
}

/// Parsed URL. Its addresses are checked at every call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub(crate) is_https: bool,
    /// Lower case; an IPv6 address has no brackets.
    pub(crate) host: String,
    /// The host, if it is an IP address.
    pub(crate) literal: Option<IpAddr>,
    pub(crate) port: u16,
    /// Value of the `Host` header: host, and port unless it is the default one.
    pub(crate) authority: HeaderValue,
    pub(crate) path: PathAndQuery,
    /// `true` exempts the addresses from checks: the operator trusts this URL.
    pub(crate) is_trusted: bool,
}

impl Target {
    /// Returns whether the URL uses TLS.
    #[must_use]
    pub const fn is_https(&self) -> bool {
        self.is_https
    }

    /// Returns the host in lower case. Together with the port it identifies the endpoint.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the explicit port or the default one.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Parses a URL strictly, without resolving the host.
    pub(crate) fn parse(text: &str) -> Result<Self, Refusal> {
        if text.len() > MAX_URL_BYTES {
            return Err(Refusal::NotAUrl);
        }
        // The URL parser drops or rewrites these characters, other parsers do not.
        if text.bytes().any(|byte| byte <= b' ' || byte == 0x7f || byte == b'\\') {
            return Err(Refusal::NotAUrl);
        }
        let (scheme, rest) = text.split_once("://").ok_or(Refusal::NotAUrl)?;
        let is_https = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err(Refusal::Scheme),
        };
        let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
        if authority.contains('@') {
            return Err(Refusal::Userinfo);
        }
        let (host, port) = split_port(authority)?;
        let url = Url::parse(text).map_err(|_| Refusal::Host)?;
        let host = host.to_ascii_lowercase();
        // Any spelling that the parser had to normalise (decimal, octal, hex, short, wide, escaped) is refused.
        let literal = match url.host().ok_or(Refusal::Host)? {
            Host::Ipv4(address) if address.to_string() == host => Some(IpAddr::V4(address)),
            // Spellings of IPv6 addresses are not compared: all parsers read them alike, and the value is judged.
            Host::Ipv6(address) if host.strip_prefix('[').is_some_and(|inner| inner.ends_with(']')) => {
                Some(IpAddr::V6(address))
            }
            Host::Domain(domain) if domain == host && is_name(&host) => None,
            Host::Ipv4(_) | Host::Ipv6(_) | Host::Domain(_) => return Err(Refusal::Host),
        };
        let default_port = if is_https { 443 } else { 80 };
        let authority = match port {
            Some(port) if port != default_port => format!("{host}:{port}"),
            _ => host.clone(),
        };
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        Ok(Self {
            is_https,
            literal,
            port: port.unwrap_or(default_port),
            authority: HeaderValue::try_from(authority).map_err(|_| Refusal::Host)?,
            path: path.parse().map_err(|_| Refusal::NotAUrl)?,
            host: literal.map_or(host, |address| address.to_string()),
            is_trusted: false,
        })
    }
}

/// Splits an authority into host (with its brackets) and port.
fn split_port(authority: &str) -> Result<(&str, Option<u16>), Refusal> {
    let host_ends = if authority.starts_with('[') {
        authority.find(']').ok_or(Refusal::Host)? + 1
    } else {
        authority.find(':').unwrap_or(authority.len())
    };
    let (host, port) = authority.split_at(host_ends);
    if host.is_empty() {
        return Err(Refusal::Host);
    }
    if port.is_empty() {
        return Ok((host, None));
    }
    let digits = port.strip_prefix(':').ok_or(Refusal::Host)?;
    // `parse` accepts a sign, and some parsers read a leading zero as octal.
    let is_plain = !digits.is_empty() && !digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_plain).ok_or(Refusal::Port)?;
    Ok((host, Some(number)))
}

/// Returns whether a host name is canonical: no empty label, no trailing dot, only letters, digits, hyphens and
/// underscores. Internationalised names must be encoded as `xn--`.
fn is_name(host: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && label.len() <= MAX_LABEL_BYTES
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    host.len() <= MAX_HOST_BYTES && host.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_has_the_parts_of_its_text() {
        let target = Target::parse("HTTPS://Hooks.Example.org:8443/in/%20a?b=c#d").unwrap();
        assert_eq!((target.is_https(), target.host(), target.port()), (true, "hooks.example.org", 8443));
        assert_eq!(
            (target.authority.to_str().unwrap(), target.path.as_str()),
            ("hooks.example.org:8443", "/in/%20a?b=c")
        );
        let target = Target::parse("https://[2606:4700::1]").unwrap();
        assert_eq!((target.host(), target.port(), target.path.as_str()), ("2606:4700::1", 443, "/"));
        assert_eq!(target.authority, "[2606:4700::1]");
        assert_eq!(Target::parse("https://xn--bcher-kva.example/").unwrap().host(), "xn--bcher-kva.example");
        assert_eq!(Target::parse("http://a.example:80/").unwrap().authority, "a.example");
    }
}
