//! [`Repeats`]: the moments at which the connection is renewed so that the engine sends frames again. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// Time after which the engine is asked to repeat a missing predecessor.
// The engine finds a lost copy by its own silence check within 3.5 s, without a new connection.
const GAP_PATIENCE: Duration = Duration::from_secs(10);
/// Minimum interval of renewals of the connection.
// Each makes the engine send everything above the acks of all agents again.
const RENEWAL_EVERY: Duration = Duration::from_secs(30);

/// Frames that the engine has to send again. It outlives a connection.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    gap_since: Option<Instant>,
    renewed_at: Option<Instant>,
}

impl Repeats {
    /// Called once a second: `has_gap` while a predecessor is missing, `has_room` since refused frames can be taken.
    /// Returns the reason for a renewal.
    pub(super) fn evaluate(&mut self, now: Instant, has_gap: bool, has_room: bool) -> Option<&'static str> {
        if !has_gap {
            self.gap_since = None;
        }
        let gap_since = has_gap.then(|| *self.gap_since.get_or_insert(now));
        let reason = if has_room {
            "frames that were refused have room"
        } else if gap_since.is_some_and(|since| now.duration_since(since) >= GAP_PATIENCE) {
            "a frame is missing"
        } else {
            return None;
        };
        if self.renewed_at.is_some_and(|renewed_at| now.duration_since(renewed_at) < RENEWAL_EVERY) {
            return None;
        }
        // A gap that remains after the renewal waits the full `GAP_PATIENCE` again.
        (self.gap_since, self.renewed_at) = (None, Some(now));
        Some(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_waited_for_and_renewals_are_rare() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut repeats = Repeats::default();
        assert_eq!(repeats.evaluate(at(0), true, false), None);
        assert_eq!(repeats.evaluate(at(5), false, false), None, "the gap is closed");
        assert_eq!(repeats.evaluate(at(6), true, false), None);
        assert_eq!(repeats.evaluate(at(15), true, false), None);
        assert!(repeats.evaluate(at(16), true, false).is_some());
        for second in 17..46 {
            assert_eq!(repeats.evaluate(at(second), true, second > 20), None, "{second}");
        }
        assert!(repeats.evaluate(at(46), false, true).is_some());
        assert_eq!(repeats.evaluate(at(80), false, false), None, "nothing has to be repeated");
    }
}
