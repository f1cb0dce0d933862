//! Rate limits of clients without a valid token, per address and gateway.

use std::{net::IpAddr, num::NonZeroU32, sync::Arc, time::Duration};

use governor::{
    Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
    middleware::StateInformationMiddleware,
    state::{InMemoryState, NotKeyed},
};
use moka::sync::Cache;
use relay_domain::{
    access::client_network::client_network, metric_names as name, workspaces::rate_limit::WINDOW_SECONDS,
};

use super::{Admission, RateLimitStatus, RateLimits};

/// Bound of the cache.
const MAX_ADDRESSES: u64 = 100_000;
/// After a minute an address has its full limit again.
const IDLE: Duration = Duration::from_secs(61);

/// Call that is charged to the client's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    /// Lookup of a workspace by its name.
    Lookup,
    /// Creation of a workspace.
    Creation,
}

impl Call {
    /// Calls of an address in one minute.
    const fn per_minute(self) -> NonZeroU32 {
        const LOOKUPS: NonZeroU32 = NonZeroU32::new(30).expect("30 is not zero");
        const CREATIONS: NonZeroU32 = NonZeroU32::new(10).expect("10 is not zero");
        match self {
            Self::Lookup => LOOKUPS,
            Self::Creation => CREATIONS,
        }
    }
}

type Limiter = RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>;

pub(super) struct Addresses(Cache<(Call, IpAddr), Arc<Limiter>>);

impl Default for Addresses {
    fn default() -> Self {
        Self(Cache::builder().max_capacity(MAX_ADDRESSES).time_to_idle(IDLE).build())
    }
}

impl RateLimits {
    /// Charges a lookup by name to an address. `None` when rate limits are disabled.
    #[must_use]
    pub fn admit_lookup(&self, address: IpAddr) -> Option<Admission> {
        self.admit_call(Call::Lookup, address)
    }

    /// Charges the creation of a workspace to an address. `None` when rate limits are disabled.
    #[must_use]
    pub fn admit_creation(&self, address: IpAddr) -> Option<Admission> {
        self.admit_call(Call::Creation, address)
    }

    fn admit_call(&self, call: Call, address: IpAddr) -> Option<Admission> {
        let limits = &self.limits;
        if !limits.config.requests {
            return None;
        }
        let limiter = limits.addresses.0.get_with((call, client_network(address)), || {
            Arc::new(RateLimiter::direct(Quota::per_minute(call.per_minute())).with_middleware())
        });
        let (limit, now) = (call.per_minute().get(), self.core.now().timestamp());
        Some(match limiter.check() {
            Ok(state) => {
                let remaining = state.remaining_burst_capacity();
                let refilled = i64::from(limit - remaining.min(limit)) * WINDOW_SECONDS / i64::from(limit);
                Admission::Admitted(RateLimitStatus { limit, remaining, reset_at: now + refilled })
            }
            Err(not_yet) => {
                metrics::counter!(name::REQUESTS_LIMITED, "by" => "address").increment(1);
                let wait = not_yet.wait_time_from(DefaultClock::default().now());
                // Rounded up, so that a client that waits as long as it is asked to is admitted.
                let seconds = (wait.as_secs() + 1).min(WINDOW_SECONDS.unsigned_abs());
                let retry_after = u16::try_from(seconds).unwrap_or(1);
                let standing = RateLimitStatus { limit, remaining: 0, reset_at: now + i64::from(retry_after) };
                Admission::Refused { standing, retry_after }
            }
        })
    }
}
