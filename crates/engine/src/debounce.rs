//! Notes that are written behind, at most twice a minute for each subject: last-seen times, uses of tokens.

use std::{hash::Hash, time::Duration};

use moka::sync::Cache;
use relay_tasks::batches::{BatchSender, Batches, QueueConfig, queue};

/// Minimum time between two notes of one subject.
const DEBOUNCE: Duration = Duration::from_secs(30);

/// Sender of notes about subjects `K`.
pub(crate) struct DebouncedNotes<K, N> {
    noted: Cache<K, ()>,
    notes: BatchSender<N>,
}

impl<K: Eq + Hash + Send + Sync + 'static, N> DebouncedNotes<K, N> {
    /// Creates the sender, which remembers up to `max_remembered` subjects, and the queue of the notes.
    pub(crate) fn new(config: QueueConfig<N>, max_remembered: u64) -> (Self, Batches<N>) {
        let (notes, batches) = queue(config);
        let noted = Cache::builder().max_capacity(max_remembered).time_to_live(DEBOUNCE).build();
        (Self { noted, notes }, batches)
    }

    /// Adds a note, unless the subject has a recent one. One that finds no room is dropped, and the next call adds it.
    pub(crate) fn add(&self, subject: K, note: impl FnOnce() -> N) {
        // Two calls at once may both add a note, which does no harm.
        if !self.noted.contains_key(&subject) && self.notes.try_send(note()).is_ok() {
            self.noted.insert(subject, ());
        }
    }

    /// Lets the next call for this subject add a note again.
    pub(crate) fn forget(&self, subject: &K) {
        self.noted.invalidate(subject);
    }
}
