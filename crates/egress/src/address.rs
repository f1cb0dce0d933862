//! Classification of IP addresses: every address outside the public internet is blocked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

/// Reason for blocking an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockedReason {
    /// Loopback address of this host.
    Loopback,
    /// A private network (RFC 1918, RFC 4193).
    Private,
    /// Link-local address (RFC 3927, RFC 4291).
    LinkLocal,
    /// Address behind carrier-grade NAT (RFC 6598).
    CarrierGrade,
    /// Multicast group.
    Multicast,
    /// Reserved, for documentation, for benchmarks, or unassigned.
    Reserved,
    /// IPv4 address embedded in an IPv6 one: mapped, compatible, 6to4, Teredo, NAT64.
    Translated,
    /// Metadata service of a cloud, which hands out credentials of its machines.
    Metadata,
}

impl BlockedReason {
    /// Returns the description for the owner of the URL.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Loopback => "a loopback",
            Self::Private => "a private",
            Self::LinkLocal => "a link-local",
            Self::CarrierGrade => "a carrier-grade NAT",
            Self::Multicast => "a multicast",
            Self::Reserved => "a reserved",
            Self::Translated => "a translated",
            Self::Metadata => "a cloud metadata",
        }
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

/// Metadata services: AWS, Azure, Google and most others; Alibaba; Oracle; Azure's wire server, which has a public
/// address.
const METADATA_V4: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
    Ipv4Addr::new(168, 63, 129, 16),
];

/// Metadata services of AWS and Google over IPv6.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

/// Multicast, and the IANA registry of special-purpose IPv4 addresses that are not globally reachable.
const SPECIAL_V4: [(Ipv4Net, BlockedReason); 17] = [
    // A connection to 0.0.0.0 leads to this host.
    (v4(0, 0, 0, 0, 8), BlockedReason::Loopback),
    (v4(10, 0, 0, 0, 8), BlockedReason::Private),
    (v4(100, 64, 0, 0, 10), BlockedReason::CarrierGrade),
    (v4(127, 0, 0, 0, 8), BlockedReason::Loopback),
    (v4(169, 254, 0, 0, 16), BlockedReason::LinkLocal),
    (v4(172, 16, 0, 0, 12), BlockedReason::Private),
    (v4(192, 0, 0, 0, 24), BlockedReason::Reserved),
    (v4(192, 0, 2, 0, 24), BlockedReason::Reserved),
    (v4(192, 52, 193, 0, 24), BlockedReason::Reserved),
    (v4(192, 88, 99, 0, 24), BlockedReason::Translated),
    (v4(192, 168, 0, 0, 16), BlockedReason::Private),
    (v4(192, 175, 48, 0, 24), BlockedReason::Reserved),
    (v4(198, 18, 0, 0, 15), BlockedReason::Reserved),
    (v4(198, 51, 100, 0, 24), BlockedReason::Reserved),
    (v4(203, 0, 113, 0, 24), BlockedReason::Reserved),
    (v4(224, 0, 0, 0, 4), BlockedReason::Multicast),
    (v4(240, 0, 0, 0, 4), BlockedReason::Reserved),
];

const fn v6(segments: [u16; 8], prefix: u8) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

/// Well-known NAT64 prefix (RFC 6052): the last four bytes are the IPv4 address.
const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);
/// Range of global unicast addresses. Everything outside is blocked.
const GLOBAL: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// Special ranges of IPv6, inside and outside of [`GLOBAL`].
// The first range that contains an address gives the reason, so narrow ranges precede the wide ones around them.
const SPECIAL_V6: [(Ipv6Net, BlockedReason); 13] = [
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 127), BlockedReason::Loopback),
    // Mapped (RFC 4291), translated (RFC 2765), compatible (deprecated), local NAT64 prefixes (RFC 8215).
    (v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), BlockedReason::Translated),
    (v6([0, 0, 0, 0, 0xffff, 0, 0, 0], 96), BlockedReason::Translated),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 96), BlockedReason::Translated),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), BlockedReason::Translated),
    // Teredo, the remaining protocol assignments, 6to4, two documentation ranges.
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), BlockedReason::Translated),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), BlockedReason::Reserved),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), BlockedReason::Reserved),
    (v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), BlockedReason::Translated),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), BlockedReason::Reserved),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), BlockedReason::Private),
    // Link-local, and the deprecated site-local addresses.
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 9), BlockedReason::LinkLocal),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), BlockedReason::Multicast),
];

/// Returns the reason for blocking an address, or `None` for an address of the public internet.
#[must_use]
pub fn blocked_reason(address: IpAddr) -> Option<BlockedReason> {
    match address {
        IpAddr::V4(address) => judge_v4(address),
        IpAddr::V6(address) => judge_v6(address),
    }
}

fn judge_v4(address: Ipv4Addr) -> Option<BlockedReason> {
    // Before the ranges, some of which contain these addresses with a less precise reason.
    if METADATA_V4.contains(&address) {
        return Some(BlockedReason::Metadata);
    }
    SPECIAL_V4.iter().find(|(net, _)| net.contains(&address)).map(|(_, reason)| *reason)
}

fn judge_v6(address: Ipv6Addr) -> Option<BlockedReason> {
    if METADATA_V6.contains(&address) {
        return Some(BlockedReason::Metadata);
    }
    if NAT64.contains(&address) {
        // Networks without IPv4 map every public host to such an address.
        let [.., a, b, c, d] = address.octets();
        return judge_v4(Ipv4Addr::new(a, b, c, d));
    }
    let special = SPECIAL_V6.iter().find(|(net, _)| net.contains(&address)).map(|(_, reason)| *reason);
    special.or_else(|| (!GLOBAL.contains(&address)).then_some(BlockedReason::Reserved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_addresses_pass() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700:4700::1111",
            "2a00:1450:4001:80b::200e",
            "2001:200::1",
            "64:ff9b::808:808",
        ] {
            assert_eq!(blocked_reason(address.parse().unwrap()), None, "{address}");
        }
    }

    #[test]
    fn all_other_addresses_are_blocked() {
        for (address, reason) in [
            ("0.0.0.0", BlockedReason::Loopback),
            ("0.1.2.3", BlockedReason::Loopback),
            ("10.255.255.255", BlockedReason::Private),
            ("100.64.0.1", BlockedReason::CarrierGrade),
            ("100.100.100.200", BlockedReason::Metadata),
            ("127.0.0.1", BlockedReason::Loopback),
            ("127.255.255.254", BlockedReason::Loopback),
            ("168.63.129.16", BlockedReason::Metadata),
            ("169.254.0.1", BlockedReason::LinkLocal),
            ("169.254.169.254", BlockedReason::Metadata),
            ("172.31.255.255", BlockedReason::Private),
            ("192.0.0.192", BlockedReason::Metadata),
            ("192.168.0.1", BlockedReason::Private),
            ("198.19.255.255", BlockedReason::Reserved),
            ("224.0.0.1", BlockedReason::Multicast),
            ("239.255.255.255", BlockedReason::Multicast),
            ("240.0.0.1", BlockedReason::Reserved),
            ("255.255.255.255", BlockedReason::Reserved),
            ("::", BlockedReason::Loopback),
            ("::1", BlockedReason::Loopback),
            ("::7f00:1", BlockedReason::Translated),
            ("::ffff:127.0.0.1", BlockedReason::Translated),
            ("::ffff:8.8.8.8", BlockedReason::Translated),
            ("::ffff:0:127.0.0.1", BlockedReason::Translated),
            ("64:ff9b::7f00:1", BlockedReason::Loopback),
            ("64:ff9b::a9fe:a9fe", BlockedReason::Metadata),
            ("64:ff9b:1::a00:1", BlockedReason::Translated),
            ("100::1", BlockedReason::Reserved),
            ("2001::1", BlockedReason::Translated),
            ("2001:10::1", BlockedReason::Reserved),
            ("2001:db8::1", BlockedReason::Reserved),
            ("2002:7f00:1::", BlockedReason::Translated),
            ("3fff::1", BlockedReason::Reserved),
            ("4000::1", BlockedReason::Reserved),
            ("5f00::1", BlockedReason::Reserved),
            ("fc00::1", BlockedReason::Private),
            ("fd00:ec2::254", BlockedReason::Metadata),
            ("fd12:3456::1", BlockedReason::Private),
            ("fe80::1", BlockedReason::LinkLocal),
            ("fec0::1", BlockedReason::LinkLocal),
            ("ff02::1", BlockedReason::Multicast),
        ] {
            assert_eq!(blocked_reason(address.parse().unwrap()), Some(reason), "{address}");
        }
    }
}
