//! Queues that one task empties in batches: group commits, batched reads, notes written behind.
//!
//! [`queue`] creates both ends. A queue is bounded in items and in bytes. Without a timer a batch takes what arrived
//! during the previous one, so that a lone item is handled at once and a busy queue gives large batches. Items of
//! different keys take turns: one workspace with thousands of items does not delay the first item of another.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::Instant,
};

use crate::metric_names::{BATCH_ITEMS, QUEUE_ITEMS, QUEUE_REFUSED};

/// Bounds and measures of a queue of `T`, whose items of different `K` take turns.
#[derive(Debug)]
pub struct QueueConfig<T, K = ()> {
    /// Label of the queue's metrics.
    pub name: &'static str,
    /// Items that the channel holds at most. As many again may be sorted by key, waiting for their turn.
    pub max_items: usize,
    /// Bytes that waiting items hold at most. A larger item waits until it is the only one.
    pub max_bytes: u32,
    /// Items of a batch at most.
    pub batch_items: usize,
    /// Bytes of a batch at most; one item may exceed it alone.
    pub batch_bytes: usize,
    /// Least time between two batches, in which items gather for the second.
    pub interval: Duration,
    /// Key whose items take turns with those of other keys; those of one key stay in order.
    pub key: fn(&T) -> K,
    /// Bytes that an item holds.
    pub bytes: fn(&T) -> usize,
}

impl<T> QueueConfig<T> {
    /// Bounds for small items of constant size, first come first served.
    #[must_use]
    pub const fn new(name: &'static str, max_items: usize, batch_items: usize) -> Self {
        Self {
            name,
            max_items,
            max_bytes: u32::MAX,
            batch_items,
            batch_bytes: usize::MAX,
            interval: Duration::ZERO,
            key: |_| (),
            bytes: |_| size_of::<T>(),
        }
    }

    /// Sets the least time between two batches.
    #[must_use]
    pub const fn at_most_every(self, interval: Duration) -> Self {
        Self { interval, ..self }
    }
}

/// Creates both ends of a queue.
#[must_use]
pub fn queue<T, K: Copy + Eq + Hash>(config: QueueConfig<T, K>) -> (BatchSender<T>, Batches<T, K>) {
    let (items, receiver) = mpsc::channel(config.max_items);
    let bytes = Arc::new(Semaphore::new(config.max_bytes as usize));
    let sender = BatchSender { name: config.name, items, bytes, max_bytes: config.max_bytes, bytes_of: config.bytes };
    (sender, Batches { items: receiver, turns: Turns::default(), next_at: Instant::now(), config })
}

/// The queue is full, or the task that empties it has ended.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct QueueFull;

/// Item that waits.
#[derive(Debug)]
struct Waiting<T> {
    item: T,
    bytes: usize,
    /// Its share of the queue's bytes; `None` when it was put back, which exceeds the bound by one batch at most.
    _share: Option<OwnedSemaphorePermit>,
}

/// Sending end of a queue.
#[derive(Debug)]
pub struct BatchSender<T> {
    name: &'static str,
    items: mpsc::Sender<Waiting<T>>,
    bytes: Arc<Semaphore>,
    max_bytes: u32,
    bytes_of: fn(&T) -> usize,
}

impl<T> BatchSender<T> {
    /// Queues an item without waiting.
    ///
    /// # Errors
    /// When the queue is full; the item is dropped.
    pub fn try_send(&self, item: T) -> Result<(), QueueFull> {
        let queued = self.waiting_at_once(item).and_then(|waiting| self.items.try_send(waiting).map_err(|_| QueueFull));
        if queued.is_err() {
            metrics::counter!(QUEUE_REFUSED, "queue" => self.name).increment(1);
        }
        queued
    }

    fn waiting_at_once(&self, item: T) -> Result<Waiting<T>, QueueFull> {
        let (bytes, share) = self.share_of(&item);
        let share = Arc::clone(&self.bytes).try_acquire_many_owned(share).map_err(|_| QueueFull)?;
        Ok(Waiting { item, bytes, _share: Some(share) })
    }

    /// Queues an item, waiting for room.
    ///
    /// # Errors
    /// When the task that empties the queue has ended; the item is dropped.
    pub async fn send(&self, item: T) -> Result<(), QueueFull> {
        let (bytes, share) = self.share_of(&item);
        let share = Arc::clone(&self.bytes).acquire_many_owned(share).await.map_err(|_| QueueFull)?;
        self.items.send(Waiting { item, bytes, _share: Some(share) }).await.map_err(|_| QueueFull)
    }

    /// Returns the bytes of an item, and those that it takes of the queue.
    fn share_of(&self, item: &T) -> (usize, u32) {
        let bytes = (self.bytes_of)(item);
        (bytes, u32::try_from(bytes).unwrap_or(u32::MAX).min(self.max_bytes))
    }

    /// Completes when the task that empties the queue has ended.
    pub async fn closed(&self) {
        self.items.closed().await;
    }
}

/// Item with a sender for its reply.
#[derive(Debug)]
pub struct Request<T, R> {
    /// Content of the request.
    pub item: T,
    /// Fails when the requester has gone.
    pub reply: oneshot::Sender<R>,
}

impl<T, R> Request<T, R> {
    fn new(item: T) -> (Self, oneshot::Receiver<R>) {
        let (reply, answer) = oneshot::channel();
        (Self { item, reply }, answer)
    }

    /// Splits requests into their items and the senders of the replies, both in order.
    #[must_use]
    pub fn split(requests: Vec<Self>) -> (Vec<T>, Vec<oneshot::Sender<R>>) {
        requests.into_iter().map(|request| (request.item, request.reply)).unzip()
    }
}

impl<T, R> BatchSender<Request<T, R>> {
    /// Queues an item that will be replied to, without waiting for room. The reply never comes if its task ends.
    ///
    /// # Errors
    /// When the queue is full; the item is dropped.
    pub fn try_request(&self, item: T) -> Result<oneshot::Receiver<R>, QueueFull> {
        let (request, answer) = Request::new(item);
        self.try_send(request).map(|()| answer)
    }

    /// Queues an item that will be replied to, waiting for room. The reply never comes if the task has ended.
    pub async fn request(&self, item: T) -> oneshot::Receiver<R> {
        let (request, answer) = Request::new(item);
        // When the task has ended, the request is dropped, and the answer with it.
        let _ = self.send(request).await;
        answer
    }
}

/// Receiving end of a queue.
#[derive(Debug)]
pub struct Batches<T, K = ()> {
    items: mpsc::Receiver<Waiting<T>>,
    turns: Turns<T, K>,
    /// Earliest time of the next batch.
    next_at: Instant,
    config: QueueConfig<T, K>,
}

impl<T, K: Copy + Eq + Hash> Batches<T, K> {
    /// Waits for items and takes the next batch; `None` when all senders are dropped and nothing waits.
    pub async fn next(&mut self) -> Option<Vec<T>> {
        if self.turns.waiting == 0 {
            let first = self.items.recv().await?;
            self.add(first);
        }
        if !self.config.interval.is_zero() {
            tokio::time::sleep_until(self.next_at).await;
            self.next_at = Instant::now() + self.config.interval;
        }
        while self.turns.waiting < self.config.max_items
            && let Ok(item) = self.items.try_recv()
        {
            self.add(item);
        }
        let batch = self.turns.take(self.config.batch_items, self.config.batch_bytes);
        Some(self.hand_out(batch))
    }

    /// Takes a batch of the waiting items of one key.
    pub fn take_key(&mut self, key: K) -> Vec<T> {
        let batch = self.turns.take_key(key, self.config.batch_items, self.config.batch_bytes);
        self.hand_out(batch)
    }

    /// Returns items of the last batch to the front of their keys, in their order.
    pub fn put_back(&mut self, items: Vec<T>) {
        for item in items.into_iter().rev() {
            let (key, bytes) = ((self.config.key)(&item), (self.config.bytes)(&item));
            self.turns.push_front(key, Waiting { item, bytes, _share: None });
        }
    }

    fn add(&mut self, waiting: Waiting<T>) {
        self.turns.push_back((self.config.key)(&waiting.item), waiting);
    }

    fn hand_out(&self, batch: Vec<Waiting<T>>) -> Vec<T> {
        let queue = self.config.name;
        metrics::histogram!(BATCH_ITEMS, "queue" => queue).record(batch.len() as f64);
        metrics::gauge!(QUEUE_ITEMS, "queue" => queue).set((self.turns.waiting + self.items.len()) as f64);
        batch.into_iter().map(|waiting| waiting.item).collect()
    }
}

/// Items in the order in which they will be taken: the keys in turn, the items of a key first come first served.
#[derive(Debug)]
struct Turns<T, K> {
    /// Keys with items, the next one first.
    order: VecDeque<K>,
    of_key: HashMap<K, VecDeque<Waiting<T>>>,
    waiting: usize,
}

impl<T, K> Default for Turns<T, K> {
    fn default() -> Self {
        Self { order: VecDeque::new(), of_key: HashMap::new(), waiting: 0 }
    }
}

impl<T, K: Copy + Eq + Hash> Turns<T, K> {
    /// Returns the items of a key, which gets the last turn if it has none yet.
    fn items_of(&mut self, key: K) -> &mut VecDeque<Waiting<T>> {
        self.waiting += 1;
        self.of_key.entry(key).or_insert_with(|| {
            self.order.push_back(key);
            VecDeque::new()
        })
    }

    fn push_back(&mut self, key: K, item: Waiting<T>) {
        self.items_of(key).push_back(item);
    }

    fn push_front(&mut self, key: K, item: Waiting<T>) {
        self.items_of(key).push_front(item);
    }

    /// Takes the next item of a key; returns `None` if it would exceed `room` bytes.
    fn take_one(&mut self, key: K, room: usize) -> Option<Waiting<T>> {
        let items = self.of_key.get_mut(&key)?;
        let item = items.pop_front_if(|item| item.bytes <= room)?;
        if items.is_empty() {
            self.of_key.remove(&key);
        }
        self.waiting -= 1;
        Some(item)
    }

    /// Takes a batch, one item of each key in turn.
    fn take(&mut self, most_items: usize, most_bytes: usize) -> Vec<Waiting<T>> {
        let mut batch = Vec::with_capacity(most_items.min(self.waiting));
        let mut room = usize::MAX;
        while batch.len() < most_items
            && let Some(key) = self.order.front().copied()
            && let Some(item) = self.take_one(key, room)
        {
            // Only the first item of a batch may be larger than the batch.
            room = room.min(most_bytes).saturating_sub(item.bytes);
            batch.push(item);
            self.order.pop_front();
            if self.of_key.contains_key(&key) {
                self.order.push_back(key);
            }
        }
        batch
    }

    /// Takes a batch of one key.
    fn take_key(&mut self, key: K, most_items: usize, most_bytes: usize) -> Vec<Waiting<T>> {
        let mut batch = Vec::new();
        let mut room = usize::MAX;
        while batch.len() < most_items
            && let Some(item) = self.take_one(key, room)
        {
            room = room.min(most_bytes).saturating_sub(item.bytes);
            batch.push(item);
        }
        if !self.of_key.contains_key(&key) {
            self.order.retain(|waiting| *waiting != key);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queue of pairs: key and number, each of `number` bytes.
    fn pairs(
        max_bytes: u32,
        batch_items: usize,
        batch_bytes: usize,
    ) -> (BatchSender<(u8, usize)>, Batches<(u8, usize), u8>) {
        queue(QueueConfig {
            name: "test",
            max_items: 16,
            max_bytes,
            batch_items,
            batch_bytes,
            interval: Duration::ZERO,
            key: |(key, _)| *key,
            bytes: |(_, bytes)| *bytes,
        })
    }

    fn send_all(sender: &BatchSender<(u8, usize)>, items: &[(u8, usize)]) {
        items.iter().for_each(|item| sender.try_send(*item).unwrap());
    }

    #[tokio::test]
    async fn keys_take_turns() {
        let (sender, mut batches) = pairs(1000, 3, 1000);
        send_all(&sender, &[(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 0), (1, 1), (1, 2)]);
        send_all(&sender, &[(2, 0)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 3), (2, 0), (1, 4)]);
        drop(sender);
        assert_eq!(batches.next().await, None);
    }

    #[tokio::test]
    async fn items_that_were_put_back_keep_their_order() {
        let (sender, mut batches) = pairs(1000, 3, 1000);
        send_all(&sender, &[(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 0), (2, 0), (1, 1)]);
        batches.put_back(vec![(1, 0), (2, 0), (1, 1)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 0), (2, 0), (1, 1)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 2), (1, 3)]);
    }

    #[tokio::test]
    async fn items_of_one_key_can_be_taken_alone() {
        let (sender, mut batches) = pairs(1000, 2, 1000);
        send_all(&sender, &[(2, 0), (1, 0), (2, 1), (1, 1), (1, 2), (1, 3)]);
        assert_eq!(batches.next().await.unwrap(), [(2, 0), (1, 0)]);
        assert_eq!(batches.take_key(1), [(1, 1), (1, 2)]);
        assert_eq!(batches.take_key(1), [(1, 3)]);
        assert_eq!(batches.take_key(1), []);
        assert_eq!(batches.next().await.unwrap(), [(2, 1)]);
    }

    #[tokio::test]
    async fn a_batch_is_bounded_in_bytes_but_for_its_first_item() {
        let (sender, mut batches) = pairs(1000, 16, 10);
        send_all(&sender, &[(1, 4), (1, 6), (1, 1), (1, 50), (1, 2)]);
        for expected in [&[(1, 4), (1, 6)][..], &[(1, 1)], &[(1, 50)], &[(1, 2)]] {
            assert_eq!(batches.next().await.unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn a_full_queue_refuses_until_a_batch_is_taken() {
        let (sender, mut batches) = pairs(10, 1, 1000);
        send_all(&sender, &[(1, 7)]);
        assert_eq!(sender.try_send((1, 4)), Err(QueueFull));
        send_all(&sender, &[(1, 3)]);
        assert_eq!(batches.next().await.unwrap(), [(1, 7)]);
        // The second item waits still; one that is larger than the queue fits once that is empty.
        assert_eq!(sender.try_send((1, 50)), Err(QueueFull));
        assert_eq!(batches.next().await.unwrap(), [(1, 3)]);
        send_all(&sender, &[(1, 50)]);
        assert_eq!(sender.try_send((1, 1)), Err(QueueFull));
        send_all(&sender, &[(1, 0); 15]);
        assert_eq!(sender.try_send((1, 0)), Err(QueueFull), "16 items wait");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_batch_is_taken_at_once_and_later_ones_at_their_interval() {
        let every = Duration::from_millis(100);
        let (sender, mut batches) = queue(QueueConfig::<u8>::new("test", 8, 8).at_most_every(every));
        let began = Instant::now();
        for (item, at) in [(1, 0), (2, 100), (3, 200)] {
            sender.try_send(item).unwrap();
            assert_eq!(batches.next().await.unwrap(), [item]);
            assert_eq!(began.elapsed(), Duration::from_millis(at));
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        sender.try_send(4).unwrap();
        batches.next().await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_millis(1200), "an idle queue waits for nothing");
    }

    #[tokio::test]
    async fn senders_wait_for_room_and_receive_their_replies() {
        let (sender, mut batches) = queue(QueueConfig::<Request<u8, u8>>::new("test", 1, 4));
        let asked = async { (sender.request(1).await.await, sender.request(2).await.await) };
        let answering = async {
            for _ in 0..2 {
                let (items, replies) = Request::split(batches.next().await.unwrap());
                items.into_iter().zip(replies).for_each(|(item, reply)| reply.send(item * 10).unwrap());
            }
        };
        let (answers, ()) = tokio::join!(asked, answering);
        assert_eq!(answers, (Ok(10), Ok(20)));
        drop(batches);
        assert!(sender.request(3).await.await.is_err());
        assert_eq!(sender.try_request(4).err(), Some(QueueFull));
        sender.closed().await;
    }
}
