//! Limit of the unknown tokens that an address may present, per gateway.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use moka::sync::Cache;
use relay_domain::{access::client_network::client_network, metric_names as name};
use tokio::time::Instant;

/// Unknown tokens of an address in one minute. Brokers and SDKs retry a refused token a few times a minute at most, and
/// several of them may share an address.
const MAX_UNKNOWN: u32 = 60;
const WINDOW: Duration = Duration::from_secs(60);
/// Bound of the addresses that are remembered.
const MAX_ADDRESSES: u64 = 100_000;

/// Counts of unknown tokens.
pub(in crate::access) struct UnknownTokens(Cache<IpAddr, Arc<Mutex<Count>>>);

struct Count {
    since: Instant,
    tokens: u32,
}

impl Default for UnknownTokens {
    fn default() -> Self {
        Self(Cache::builder().max_capacity(MAX_ADDRESSES).time_to_idle(WINDOW).build())
    }
}

impl UnknownTokens {
    /// Charges a token before its lookup, so that lookups in parallel cannot exceed the limit.
    ///
    /// # Errors
    /// The seconds until the next attempt.
    pub(in crate::access) fn charge(&self, address: IpAddr) -> Result<(), u16> {
        let count = self.count(address);
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        if count.since.elapsed() >= WINDOW {
            *count = Count { since: Instant::now(), tokens: 0 };
        }
        if count.tokens >= MAX_UNKNOWN {
            metrics::counter!(name::REQUESTS_LIMITED, "by" => "address").increment(1);
            let left = WINDOW.saturating_sub(count.since.elapsed()).as_secs() + 1;
            return Err(u16::try_from(left).unwrap_or(1).min(60));
        }
        count.tokens += 1;
        Ok(())
    }

    /// Takes a charge back: the token was known.
    pub(in crate::access) fn refund(&self, address: IpAddr) {
        let count = self.count(address);
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        // A new window may have begun since the charge.
        count.tokens = count.tokens.saturating_sub(1);
    }

    fn count(&self, address: IpAddr) -> Arc<Mutex<Count>> {
        // Concurrent first tokens of an address share one count.
        self.0.get_with(client_network(address), || Arc::new(Mutex::new(Count { since: Instant::now(), tokens: 0 })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_presents_a_bounded_number_of_unknown_tokens_per_minute() {
        let limit = UnknownTokens::default();
        let (attacker, other) = ("198.51.100.7".parse().unwrap(), "198.51.100.8".parse().unwrap());
        for _ in 0..1000 {
            assert_eq!(limit.charge(attacker), Ok(()), "known tokens cost nothing");
            limit.refund(attacker);
        }
        for _ in 0..MAX_UNKNOWN {
            assert_eq!(limit.charge(attacker), Ok(()));
        }
        assert_eq!(limit.charge(attacker), Err(60));
        assert_eq!(limit.charge(other), Ok(()));
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(limit.charge(attacker), Err(11));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(limit.charge(attacker), Ok(()));
    }
}
