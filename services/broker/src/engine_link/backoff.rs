//! Pauses between connections.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Time after which a connection counts as healthy: the next pause is short again.
const HEALTHY: Duration = Duration::from_secs(10);

/// Pauses of 1, 2, 4 … 30 s.
#[derive(Debug, Clone)]
pub(super) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Backoff {
    /// Pause after a connection that lasted for `lasted`. `jitter` is between 0 and 1 and shortens it by up to a half,
    /// so that the nodes of a failed gateway do not come back together.
    pub(super) fn pause(&mut self, lasted: Duration, jitter: f64) -> Duration {
        if lasted >= HEALTHY {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = (self.next * 2).min(MAX_PAUSE);
        pause.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_half_a_minute_and_health_resets_them() {
        let mut backoff = Backoff::default();
        let pauses: Vec<u64> = (0..7).map(|_| backoff.pause(Duration::ZERO, 0.0).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(backoff.pause(Duration::from_secs(10), 1.0), Duration::from_millis(500));
    }
}
