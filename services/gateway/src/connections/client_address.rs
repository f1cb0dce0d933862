//! Address of a client, also behind trusted proxies.

use std::net::{IpAddr, SocketAddr};

use axum::{
    extract::{ConnectInfo, Request},
    http::{HeaderMap, HeaderName, request::Parts},
};
use ipnet::IpNet;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Remote address of a connection.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(pub SocketAddr);

/// Address of a request's client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAddress {
    /// The peer of the connection.
    Peer(IpAddr),
    /// Named by a trusted proxy.
    Forwarded(IpAddr),
    /// The request came over no connection, as in unit tests.
    Unknown,
}

impl ClientAddress {
    /// Returns the client's address: the peer or, if the peer is a trusted proxy, the last untrusted address of
    /// `X-Forwarded-For`. Addresses to the left of it are sent by the client and prove nothing.
    pub(super) fn of_request(request: &Request, trusted: &[IpNet]) -> Self {
        match request.extensions().get::<ConnectInfo<PeerAddress>>() {
            Some(ConnectInfo(PeerAddress(peer))) => Self::from_peer(peer.ip(), request.headers(), trusted),
            None => Self::Unknown,
        }
    }

    /// Returns the address that `admit_request` determined.
    pub(crate) fn of_parts(parts: &Parts) -> Self {
        parts.extensions.get().copied().unwrap_or(Self::Unknown)
    }

    fn from_peer(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> Self {
        let is_trusted = |address: &IpAddr| trusted.iter().any(|network| network.contains(address));
        let peer = peer.to_canonical();
        let mut client = Self::Peer(peer);
        let lines = headers.get_all(FORWARDED_FOR).iter().collect::<Vec<_>>();
        let hops = lines.iter().rev().flat_map(|line| line.to_str().unwrap_or_default().rsplit(','));
        for hop in hops {
            if !client.ip().is_some_and(|address| is_trusted(&address)) {
                break;
            }
            // An entry that is no address was not written by a trusted proxy, and neither was anything to the left of
            // it.
            let Ok(address) = hop.trim().parse::<IpAddr>() else { break };
            client = Self::Forwarded(address.to_canonical());
        }
        client
    }

    /// Returns the address, if it is known.
    pub(crate) const fn ip(self) -> Option<IpAddr> {
        match self {
            Self::Peer(address) | Self::Forwarded(address) => Some(address),
            Self::Unknown => None,
        }
    }

    /// Returns the address, if clients at it are limited: those on this machine are not.
    pub(crate) fn limited_ip(self) -> Option<IpAddr> {
        self.ip().filter(|address| !address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_client_is_the_last_hop_that_is_not_a_trusted_proxy() {
        let proxies: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap(), "192.0.2.1/32".parse().unwrap()];
        for (peer, forwarded, trusted, expected) in [
            ("203.0.113.9", "198.51.100.1", &proxies[..0], "203.0.113.9"),
            ("203.0.113.9", "198.51.100.1", &proxies, "203.0.113.9"),
            ("10.0.0.1", "198.51.100.1", &proxies, "198.51.100.1"),
            ("10.0.0.1", "1.1.1.1, 198.51.100.1, 192.0.2.1", &proxies, "198.51.100.1"),
            ("10.0.0.1", "nonsense", &proxies, "10.0.0.1"),
            ("10.0.0.1", "", &proxies, "10.0.0.1"),
            ("::ffff:10.0.0.1", "2001:db8::1", &proxies, "2001:db8::1"),
        ] {
            let headers = HeaderMap::from_iter([(FORWARDED_FOR, HeaderValue::from_static(forwarded))]);
            let client = ClientAddress::from_peer(peer.parse().unwrap(), &headers, trusted);
            assert_eq!(client.ip(), Some(expected.parse().unwrap()), "{peer} {forwarded}");
            assert_eq!(matches!(client, ClientAddress::Forwarded(_)), expected != peer.trim_start_matches("::ffff:"));
        }
    }
}
