//! Which addresses are nobody's business to call through us.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

/// Why an address is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// This host, under any of its names.
    Loopback,
    /// A private network (RFC 1918, RFC 4193).
    Private,
    /// Only on the link (RFC 3927, RFC 4291).
    LinkLocal,
    /// Behind a carrier's translation (RFC 6598).
    CarrierGrade,
    /// A group, not a host.
    Multicast,
    /// Reserved, for documentation, for benchmarks, or not handed out.
    Reserved,
    /// A version 4 address in the clothes of a version 6 one: mapped, compatible, 6to4, Teredo, NAT64.
    Translated,
    /// Where a cloud hands out the credentials of its machines.
    Metadata,
}

impl Reason {
    /// As it is told to whoever gave the URL.
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

/// Where clouds answer: AWS, Azure, Google and most others; Alibaba; Oracle; Azure's wire server, which is in the
/// middle of public space.
const METADATA_V4: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
    Ipv4Addr::new(168, 63, 129, 16),
];

/// AWS and Google, over version 6.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

/// The IANA registry of special-purpose IPv4 addresses, as far as it is not reachable globally, with multicast.
const SPECIAL_V4: [(Ipv4Net, Reason); 17] = [
    (v4(0, 0, 0, 0, 8), Reason::Loopback),
    (v4(10, 0, 0, 0, 8), Reason::Private),
    (v4(100, 64, 0, 0, 10), Reason::CarrierGrade),
    (v4(127, 0, 0, 0, 8), Reason::Loopback),
    (v4(169, 254, 0, 0, 16), Reason::LinkLocal),
    (v4(172, 16, 0, 0, 12), Reason::Private),
    (v4(192, 0, 0, 0, 24), Reason::Reserved),
    (v4(192, 0, 2, 0, 24), Reason::Reserved),
    (v4(192, 52, 193, 0, 24), Reason::Reserved),
    (v4(192, 88, 99, 0, 24), Reason::Translated),
    (v4(192, 168, 0, 0, 16), Reason::Private),
    (v4(192, 175, 48, 0, 24), Reason::Reserved),
    (v4(198, 18, 0, 0, 15), Reason::Reserved),
    (v4(198, 51, 100, 0, 24), Reason::Reserved),
    (v4(203, 0, 113, 0, 24), Reason::Reserved),
    (v4(224, 0, 0, 0, 4), Reason::Multicast),
    (v4(240, 0, 0, 0, 4), Reason::Reserved),
];

const fn v6(segments: [u16; 8], prefix: u8) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

/// NAT64's well-known prefix (RFC 6052): the last four bytes are the address that is meant.
const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);
/// All that is handed out for hosts. What is outside is refused, whatever it is.
const GLOBAL: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// Parts of version 6 that are named, inside and outside of [`GLOBAL`].
const SPECIAL_V6: [(Ipv6Net, Reason); 13] = [
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 127), Reason::Loopback),
    // Mapped (RFC 4291), translated (RFC 2765), compatible (deprecated), NAT64 of a local kind (RFC 8215).
    (v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), Reason::Translated),
    (v6([0, 0, 0, 0, 0xffff, 0, 0, 0], 96), Reason::Translated),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 96), Reason::Translated),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), Reason::Translated),
    // Teredo, then the rest of the protocol assignments around it, 6to4, documentation twice.
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), Reason::Translated),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), Reason::Reserved),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), Reason::Reserved),
    (v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), Reason::Translated),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Reason::Reserved),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Reason::Private),
    // Link-local, and the site-local ones that were given up.
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 9), Reason::LinkLocal),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Reason::Multicast),
];

/// Why nobody may call this address through us, or `None` if it is an address of the public internet.
#[must_use]
pub fn judge(address: IpAddr) -> Option<Reason> {
    match address {
        IpAddr::V4(address) => judge_v4(address),
        IpAddr::V6(address) => judge_v6(address),
    }
}

fn judge_v4(address: Ipv4Addr) -> Option<Reason> {
    if METADATA_V4.contains(&address) {
        return Some(Reason::Metadata);
    }
    SPECIAL_V4.iter().find(|(net, _)| net.contains(&address)).map(|(_, reason)| *reason)
}

fn judge_v6(address: Ipv6Addr) -> Option<Reason> {
    if METADATA_V6.contains(&address) {
        return Some(Reason::Metadata);
    }
    if NAT64.contains(&address) {
        // In a network without version 4 every public host looks like this.
        let [.., a, b, c, d] = address.octets();
        return judge_v4(Ipv4Addr::new(a, b, c, d));
    }
    let special = SPECIAL_V6.iter().find(|(net, _)| net.contains(&address)).map(|(_, reason)| *reason);
    special.or_else(|| (!GLOBAL.contains(&address)).then_some(Reason::Reserved))
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
            assert_eq!(judge(address.parse().unwrap()), None, "{address}");
        }
    }

    #[test]
    fn everything_else_does_not() {
        for (address, reason) in [
            ("0.0.0.0", Reason::Loopback),
            ("0.1.2.3", Reason::Loopback),
            ("10.255.255.255", Reason::Private),
            ("100.64.0.1", Reason::CarrierGrade),
            ("100.100.100.200", Reason::Metadata),
            ("127.0.0.1", Reason::Loopback),
            ("127.255.255.254", Reason::Loopback),
            ("168.63.129.16", Reason::Metadata),
            ("169.254.0.1", Reason::LinkLocal),
            ("169.254.169.254", Reason::Metadata),
            ("172.31.255.255", Reason::Private),
            ("192.0.0.192", Reason::Metadata),
            ("192.168.0.1", Reason::Private),
            ("198.19.255.255", Reason::Reserved),
            ("224.0.0.1", Reason::Multicast),
            ("239.255.255.255", Reason::Multicast),
            ("240.0.0.1", Reason::Reserved),
            ("255.255.255.255", Reason::Reserved),
            ("::", Reason::Loopback),
            ("::1", Reason::Loopback),
            ("::7f00:1", Reason::Translated),
            ("::ffff:127.0.0.1", Reason::Translated),
            ("::ffff:8.8.8.8", Reason::Translated),
            ("::ffff:0:127.0.0.1", Reason::Translated),
            ("64:ff9b::7f00:1", Reason::Loopback),
            ("64:ff9b::a9fe:a9fe", Reason::Metadata),
            ("64:ff9b:1::a00:1", Reason::Translated),
            ("100::1", Reason::Reserved),
            ("2001::1", Reason::Translated),
            ("2001:10::1", Reason::Reserved),
            ("2001:db8::1", Reason::Reserved),
            ("2002:7f00:1::", Reason::Translated),
            ("3fff::1", Reason::Reserved),
            ("4000::1", Reason::Reserved),
            ("5f00::1", Reason::Reserved),
            ("fc00::1", Reason::Private),
            ("fd00:ec2::254", Reason::Metadata),
            ("fd12:3456::1", Reason::Private),
            ("fe80::1", Reason::LinkLocal),
            ("fec0::1", Reason::LinkLocal),
            ("ff02::1", Reason::Multicast),
        ] {
            assert_eq!(judge(address.parse().unwrap()), Some(reason), "{address}");
        }
    }
}
