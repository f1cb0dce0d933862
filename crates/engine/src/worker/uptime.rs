//! How long this process has seen Postgres up. While it was away nobody could renew a lease or report a
//! heartbeat, so nobody may be judged by them.

use std::time::{Duration, Instant};

/// The loops touch Postgres at least each second. A longer silence means that this process was paused, or
/// that Postgres was: either way it does not know.
const LONGEST_GAP: Duration = Duration::from_secs(5);

/// An unbroken run of successful looks at Postgres.
#[derive(Debug, Default)]
pub(super) struct Uptime {
    /// The first and the latest look of the run.
    run: Option<(Instant, Instant)>,
}

impl Uptime {
    /// Postgres answered.
    pub(super) fn saw_up(&mut self, now: Instant) {
        let since = match self.run {
            Some((since, latest)) if now.saturating_duration_since(latest) <= LONGEST_GAP => since,
            _ => now,
        };
        self.run = Some((since, now));
    }

    /// Postgres was away.
    pub(super) fn saw_down(&mut self) {
        self.run = None;
    }

    /// How long it has been up without a break, as far as seen.
    pub(super) fn up_for(&self, now: Instant) -> Duration {
        match self.run {
            Some((since, _)) if self.is_up(now) => now.saturating_duration_since(since),
            _ => Duration::ZERO,
        }
    }

    /// Whether it answered a moment ago.
    pub(super) fn is_up(&self, now: Instant) -> bool {
        self.run.is_some_and(|(_, latest)| now.saturating_duration_since(latest) <= LONGEST_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_break_or_a_pause_starts_the_run_anew() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut uptime = Uptime::default();
        assert_eq!(uptime.up_for(at(0)), Duration::ZERO, "nothing seen yet");
        for second in 0..=10 {
            uptime.saw_up(at(second));
        }
        assert_eq!(uptime.up_for(at(11)), Duration::from_secs(11));

        uptime.saw_down();
        assert!(!uptime.is_up(at(11)));
        uptime.saw_up(at(12));
        assert_eq!(uptime.up_for(at(13)), Duration::from_secs(1), "the outage ended the run");

        assert_eq!(uptime.up_for(at(60)), Duration::ZERO, "paused: nothing was seen for long");
        uptime.saw_up(at(60));
        assert_eq!(uptime.up_for(at(61)), Duration::from_secs(1), "the pause ended the run");
    }
}
