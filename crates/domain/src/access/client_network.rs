//! Unit in which clients without credentials are limited.

use core::net::{IpAddr, Ipv6Addr};

/// Maps an address to the unit that is limited: an IPv6 user has a whole /64.
#[must_use]
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64)).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_network_counts_as_one_address() {
        for (address, expected) in
            [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::")]
        {
            assert_eq!(client_network(address.parse().unwrap()), expected.parse::<IpAddr>().unwrap());
        }
    }
}
