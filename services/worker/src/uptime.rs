//! Uptime of Postgres as seen by this process. During an outage no process could renew a lease or report a heartbeat,
//! so none may be judged by them.

use std::time::Duration;

use relay_engine::recovery::Readiness;
use tokio::time::Instant;

/// Loops, and the reads of the work that they wait for, reach Postgres at least each second. A longer gap means that
/// this process or Postgres was paused, so the state in between is unknown.
const MAX_GAP: Duration = Duration::from_secs(5);

/// Run of successful contacts with Postgres without a gap.
#[derive(Debug, Default)]
pub(super) struct Uptime {
    /// First and latest contact of the run.
    run: Option<(Instant, Instant)>,
}

impl Uptime {
    /// Records a success. One while the engine is closed does not count: other processes are closed too during a
    /// recovery of the database, and renew no leases.
    pub(super) fn record_up(&mut self, readiness: Readiness, now: Instant) {
        if matches!(readiness, Readiness::Closed(_)) {
            return;
        }
        let since = match self.run {
            Some((since, latest)) if now.saturating_duration_since(latest) <= MAX_GAP => since,
            _ => now,
        };
        self.run = Some((since, now));
    }

    /// Records a failure.
    pub(super) fn record_down(&mut self) {
        self.run = None;
    }

    /// Returns the length of the present run.
    pub(super) fn up_for(&self, now: Instant) -> Duration {
        match self.run {
            Some((since, _)) if self.is_up(now) => now.saturating_duration_since(since),
            _ => Duration::ZERO,
        }
    }

    /// True if the latest contact was a moment ago.
    pub(super) fn is_up(&self, now: Instant) -> bool {
        self.run.is_some_and(|(_, latest)| now.saturating_duration_since(latest) <= MAX_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: Readiness = Readiness::Open(0);

    #[test]
    fn uptime_begins_after_a_recovery() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut uptime = Uptime::default();
        for second in 0..300 {
            uptime.record_up(Readiness::Closed("another process is recovering the database"), at(second));
        }
        assert!(!uptime.is_up(at(300)));
        uptime.record_up(OPEN, at(300));
        assert_eq!(uptime.up_for(at(301)), Duration::from_secs(1));
    }

    #[test]
    fn gaps_restart_the_uptime() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut uptime = Uptime::default();
        assert_eq!(uptime.up_for(at(0)), Duration::ZERO, "nothing seen yet");
        for second in 0..=10 {
            uptime.record_up(OPEN, at(second));
        }
        assert_eq!(uptime.up_for(at(11)), Duration::from_secs(11));

        uptime.record_down();
        assert!(!uptime.is_up(at(11)));
        uptime.record_up(OPEN, at(12));
        assert_eq!(uptime.up_for(at(13)), Duration::from_secs(1), "the outage ended the run");

        assert_eq!(uptime.up_for(at(60)), Duration::ZERO, "paused: nothing was seen for long");
        uptime.record_up(OPEN, at(60));
        assert_eq!(uptime.up_for(at(61)), Duration::from_secs(1), "the pause ended the run");
    }
}
