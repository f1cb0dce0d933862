//! [`NewestValues`]: values merged by key until one task takes them, such as the cursors and heartbeats that the engine
//! writes behind.
//!
//! During an outage they hold one value per key, where a queue ([`batches`](crate::batches)) grows to its bound and
//! then refuses further items.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::metric_names::BATCH_ITEMS;

/// Newest values by key, until they are taken.
#[derive(Debug)]
pub struct NewestValues<K, V> {
    /// Label of the metrics.
    name: &'static str,
    waiting: Mutex<HashMap<K, V>>,
    added: Notify,
    /// Adds a later value of the same key to an earlier one.
    merge: fn(&mut V, V),
}

impl<K: Eq + Hash, V> NewestValues<K, V> {
    /// Creates an empty collection. `merge` adds a later value to an earlier one of the same key.
    #[must_use]
    pub fn new(name: &'static str, merge: fn(&mut V, V)) -> Self {
        Self { name, waiting: Mutex::default(), added: Notify::new(), merge }
    }

    /// Adds a value, which is later than the one that waits.
    pub fn add(&self, key: K, value: V) {
        match self.lock().entry(key) {
            Entry::Occupied(mut earlier) => (self.merge)(earlier.get_mut(), value),
            Entry::Vacant(place) => _ = place.insert(value),
        }
        // Leaves a permit if no task waits, so that a value that was added before the wait is not missed.
        self.added.notify_one();
    }

    /// Puts taken values back that were not written. Values that were added meanwhile are later; of several values of
    /// one key, the latest comes first.
    pub fn put_back(&self, unwritten: impl IntoIterator<Item = (K, V)>) {
        let mut waiting = self.lock();
        for (key, mut earlier) in unwritten {
            match waiting.entry(key) {
                Entry::Occupied(mut place) => {
                    std::mem::swap(place.get_mut(), &mut earlier);
                    let later = earlier;
                    (self.merge)(place.get_mut(), later);
                }
                Entry::Vacant(place) => _ = place.insert(earlier),
            }
        }
        // Before the wake-up, because the task takes the lock at once.
        drop(waiting);
        self.added.notify_one();
    }

    /// Takes all values, in no order.
    pub fn take(&self) -> HashMap<K, V> {
        let taken = std::mem::take(&mut *self.lock());
        if !taken.is_empty() {
            metrics::histogram!(BATCH_ITEMS, "queue" => self.name).record(taken.len() as f64);
        }
        taken
    }

    /// Waits until a value was added or put back since the last wait. One task waits at a time.
    pub async fn wait_for_values(&self) {
        self.added.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// Texts of a key in the order in which they were added.
    fn texts() -> NewestValues<u8, String> {
        NewestValues::new("texts", |earlier, later| earlier.push_str(&later))
    }

    fn taken(texts: &NewestValues<u8, String>) -> Vec<(u8, String)> {
        let mut taken: Vec<_> = texts.take().into_iter().collect();
        taken.sort();
        taken
    }

    #[test]
    fn values_of_a_key_are_merged_in_their_order() {
        let texts = texts();
        texts.add(1, "a".to_owned());
        texts.add(2, "x".to_owned());
        let unwritten = texts.take();
        assert!(taken(&texts).is_empty());
        texts.add(1, "b".to_owned());
        texts.put_back(unwritten);
        texts.add(1, "c".to_owned());
        assert_eq!(taken(&texts), [(1, "abc".to_owned()), (2, "x".to_owned())]);
    }

    #[test]
    fn a_waiting_task_learns_of_values_that_came_before() {
        let texts = texts();
        assert!(texts.wait_for_values().now_or_never().is_none());
        texts.add(1, "a".to_owned());
        assert!(texts.wait_for_values().now_or_never().is_some());
        assert!(texts.wait_for_values().now_or_never().is_none(), "one wake-up for one value");
        texts.put_back(texts.take());
        assert!(texts.wait_for_values().now_or_never().is_some());
    }
}
