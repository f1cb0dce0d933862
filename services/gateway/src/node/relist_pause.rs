//! [`RelistPause`]: full lists of all bindings after lost hints, with a pause between two of them. Used by the
//! registry.

use std::time::Duration;

use tokio::time::Instant;

/// Time of the next full list. Any number of requests within the pause cause one.
#[derive(Debug)]
pub(super) struct RelistPause {
    pause: Duration,
    listed_at: Instant,
    due_at: Option<Instant>,
}

impl RelistPause {
    /// Begins as if a list had been made at `now`.
    pub(super) const fn new(pause: Duration, now: Instant) -> Self {
        Self { pause, listed_at: now, due_at: None }
    }

    /// Asks for a list, at the end of the pause.
    pub(super) fn request(&mut self) {
        self.due_at.get_or_insert(self.listed_at + self.pause);
    }

    /// Returns when a requested list is due.
    pub(super) const fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// Begins a pause after a list.
    pub(super) const fn complete(&mut self, now: Instant) {
        (self.listed_at, self.due_at) = (now, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);

    #[test]
    fn lost_hints_cause_one_list_in_each_pause() {
        let start = Instant::now();
        let mut relists = RelistPause::new(PAUSE, start);
        let mut lists = 0;
        for millisecond in 0..10_500 {
            let now = start + Duration::from_millis(millisecond);
            if relists.due_at().is_some_and(|due_at| due_at <= now) {
                relists.complete(now);
                lists += 1;
            }
            relists.request();
        }
        assert_eq!(lists, 10);
    }

    #[test]
    fn a_list_is_due_only_when_hints_were_lost_and_then_at_once_after_a_pause() {
        let start = Instant::now();
        let mut relists = RelistPause::new(PAUSE, start);
        assert_eq!(relists.due_at(), None);
        relists.request();
        assert_eq!(relists.due_at(), Some(start + PAUSE));
        relists.complete(start + 10 * PAUSE);
        assert_eq!(relists.due_at(), None);
    }
}
