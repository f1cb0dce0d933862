//! What the text of a URL may look like. Anything that two readers might understand differently is refused,
//! rather than understood as one of them does.

use std::net::IpAddr;

use http::{HeaderValue, uri::PathAndQuery};
use url::{Host, Url};

use crate::address::Reason;

/// The longest URL, in bytes.
pub(crate) const MAX_URL_BYTES: usize = 2048;
/// The longest name of a host, in bytes (RFC 1035).
const MAX_HOST_BYTES: usize = 253;
/// The longest part of one between its dots.
const MAX_LABEL_BYTES: usize = 63;

/// Why a URL is not called. Says nothing about what is inside our network, so it may be shown to whoever gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not a URL, or a longer one than 2048 bytes.
    #[error("it is not an absolute URL of at most {MAX_URL_BYTES} bytes")]
    NotAUrl,
    /// Neither `https` nor, where that is allowed, `http`.
    #[error("its scheme must be https")]
    Scheme,
    /// A user name or a password.
    #[error("it must not carry a user name or password")]
    Userinfo,
    /// A host in an unusual spelling.
    #[error("its host must be a name in ASCII, or an address in its usual spelling")]
    Host,
    /// A port that is empty, zero, too large or oddly spelled.
    #[error("its port must be a number from 1 to 65535")]
    Port,
    /// A name that means something inside a network only.
    #[error("its host is a name of a private network")]
    PrivateName,
    /// An address that is not of the public internet.
    #[error("its host has {} address", .0.as_str())]
    Address(Reason),
}

/// A URL whose text was checked. Where it leads is checked each time it is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub(crate) is_https: bool,
    /// In lower case; a version 6 address without brackets.
    pub(crate) host: String,
    /// The host, if it is an address.
    pub(crate) literal: Option<IpAddr>,
    pub(crate) port: u16,
    /// Host and, unless it is the scheme's own, port, as in the header.
    pub(crate) authority: HeaderValue,
    pub(crate) path: PathAndQuery,
    /// Whether its addresses need no judgement: the operator vouches for it.
    pub(crate) is_vouched: bool,
}

impl Target {
    /// Whether it is called over TLS.
    #[must_use]
    pub const fn is_https(&self) -> bool {
        self.is_https
    }

    /// The host in lower case: what endpoints are told apart by, with the port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, named or the scheme's.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Reads a URL strictly. What its host leads to is not looked at here.
    pub(crate) fn read(text: &str) -> Result<Self, Refusal> {
        if text.len() > MAX_URL_BYTES {
            return Err(Refusal::NotAUrl);
        }
        // The URL parser drops or bends these, others do not.
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
        // Whatever the parser had to translate (decimal, octal, hex, short, wide, escaped) is refused.
        let literal = match url.host().ok_or(Refusal::Host)? {
            Host::Ipv4(address) if address.to_string() == host => Some(IpAddr::V4(address)),
            Host::Ipv6(address) if host.strip_prefix('[').is_some_and(|inner| inner.ends_with(']')) => {
                Some(IpAddr::V6(address))
            }
            Host::Domain(domain) if domain == host && is_name(&host) => None,
            _ => return Err(Refusal::Host),
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
            is_vouched: false,
        })
    }
}

/// Host (with its brackets) and port.
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
    let is_plain = !digits.is_empty() && !digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_plain).ok_or(Refusal::Port)?;
    Ok((host, Some(number)))
}

/// Whether a name is spelled like one of a host: no empty part, no dot at its end, nothing but letters, digits,
/// hyphens and underscores. Names in other scripts come as `xn--`.
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
    fn a_target_is_what_the_text_says() {
        let target = Target::read("HTTPS://Hooks.Example.org:8443/in/%20a?b=c#d").unwrap();
        assert_eq!((target.is_https(), target.host(), target.port()), (true, "hooks.example.org", 8443));
        assert_eq!(
            (target.authority.to_str().unwrap(), target.path.as_str()),
            ("hooks.example.org:8443", "/in/%20a?b=c")
        );
        let target = Target::read("https://[2606:4700::1]").unwrap();
        assert_eq!((target.host(), target.port(), target.path.as_str()), ("2606:4700::1", 443, "/"));
        assert_eq!(target.authority, "[2606:4700::1]");
        assert_eq!(Target::read("https://xn--bcher-kva.example/").unwrap().host(), "xn--bcher-kva.example");
        assert_eq!(Target::read("http://a.example:80/").unwrap().authority, "a.example");
    }
}
