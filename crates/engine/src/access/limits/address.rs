//! Rate limit for lookups without a token, per address and gateway.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
    middleware::StateInformationMiddleware,
    state::{InMemoryState, NotKeyed},
};
use moka::sync::Cache;
use relay_domain::{metric_names as name, workspaces::rate_limit::WINDOW_SECONDS};

use super::{Admission, RateLimitStatus, RateLimits};

/// Lookups by name per address in one minute.
const LOOKUPS_PER_MINUTE: NonZeroU32 = NonZeroU32::new(30).expect("30 is not zero");
/// Bound of the cache.
const MAX_ADDRESSES: u64 = 100_000;
/// After a minute an address has its full limit again.
const IDLE: Duration = Duration::from_secs(61);

type Limiter = RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>;

pub(super) struct Addresses(Cache<IpAddr, Arc<Limiter>>);

impl Default for Addresses {
    fn default() -> Self {
        Self(Cache::builder().max_capacity(MAX_ADDRESSES).time_to_idle(IDLE).build())
    }
}

impl RateLimits {
    /// Charges a lookup by name to an address. `None` when rate limits are disabled.
    #[must_use]
    pub fn admit_lookup(&self, address: IpAddr) -> Option<Admission> {
        let limits = &self.limits;
        if !limits.config.requests {
            return None;
        }
        let limiter = limits.addresses.0.get_with(rate_limit_network(address), || {
            Arc::new(RateLimiter::direct(Quota::per_minute(LOOKUPS_PER_MINUTE)).with_middleware())
        });
        let (limit, now) = (LOOKUPS_PER_MINUTE.get(), self.core.now().timestamp());
        Some(match limiter.check() {
            Ok(state) => {
                let remaining = state.remaining_burst_capacity();
                let refilled = i64::from((limit - remaining.min(limit)) * 2);
                Admission::Admitted(RateLimitStatus { limit, remaining, reset_at: now + refilled })
            }
            Err(not_yet) => {
                metrics::counter!(name::REQUESTS_LIMITED, "by" => "address").increment(1);
                let wait = not_yet.wait_time_from(DefaultClock::default().now());
                let seconds = (wait.as_secs() + 1).min(WINDOW_SECONDS.unsigned_abs());
                let retry_after = u16::try_from(seconds).unwrap_or(1);
                let standing = RateLimitStatus { limit, remaining: 0, reset_at: now + i64::from(retry_after) };
                Admission::Refused { standing, retry_after }
            }
        })
    }
}

/// Maps an address to the unit that is limited: an IPv6 user has a whole /64.
fn rate_limit_network(address: IpAddr) -> IpAddr {
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
            assert_eq!(rate_limit_network(address.parse().unwrap()), expected.parse::<IpAddr>().unwrap());
        }
    }
}
