//! Loopback ports that stay reserved over restarts.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};

use anyhow::{Context as _, Result, anyhow, bail};

/// Below the range of outgoing connections, so that a port is not taken (or even connected to itself) while its server
/// is down.
const RANGE: std::ops::Range<u16> = 10_000..32_000;

/// Free TCP port on 127.0.0.1, reserved while this value lives.
///
/// The reservation is a UDP socket on the same number: other test processes see it and choose another port, and the
/// kernel releases it when this process dies.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reservation: UdpSocket,
}

impl Port {
    /// Reserves a free port.
    pub fn free() -> Result<Self> {
        for _ in 0..500 {
            let number = random_in_range();
            let Ok(reservation) = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)) else {
                continue;
            };
            // Other servers of this machine hold ports without a reservation.
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                return Ok(Self { number, _reservation: reservation });
            }
        }
        bail!("found no free loopback port in {RANGE:?}")
    }

    /// Returns the port number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns `127.0.0.1:port` as text.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }

    /// Returns `url` with this port's address instead of its own.
    pub(crate) fn replace_address(&self, url: &str) -> Result<String> {
        let mut url = reqwest::Url::parse(url).with_context(|| format!("parse {url}"))?;
        url.set_host(Some("127.0.0.1"))?;
        url.set_port(Some(self.number)).map_err(|()| anyhow!("{url} takes no port"))?;
        // Url prints an empty path as nothing for unknown schemes and as "/" for known ones; both are fine here.
        Ok(url.to_string())
    }
}

fn random_in_range() -> u16 {
    let random = uuid::Uuid::new_v4().as_u128();
    let width = u128::from(RANGE.end - RANGE.start);
    RANGE.start + u16::try_from(random % width).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_not_handed_out_twice_and_can_be_listened_on() {
        let ports: Vec<Port> = (0..50).map(|_| Port::free().unwrap()).collect();
        let mut numbers: Vec<u16> = ports.iter().map(Port::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 50);
        TcpListener::bind(ports[0].address()).unwrap();
    }
}
