//! Queues that one task empties in batches: group commits, batched reads, notes written behind.
//!
//! [`queue`] creates both ends. A queue is bounded in items and in bytes. Without a timer a batch takes what arrived
//! during the previous one, so that a lone item is handled at once and a busy queue gives large batches. Items of
//! different keys take turns by weight: one workspace with thousands of items, or with costly ones, does not delay the
//! first item of another, and holds at most its share of the queue.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
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
    /// Part of the queue, in items and in bytes, that one key holds at most: 4 is a quarter, 1 is all of it.
    pub key_share: u32,
    /// Bytes that waiting items hold at most. A larger item waits until it is the only one.
    pub max_bytes: u32,
    /// Items of a batch at most.
    pub batch_items: usize,
    /// Bytes of a batch at most; one item may exceed it alone.
    pub batch_bytes: usize,
    /// Weight at which a batch is complete; its last item may exceed it.
    pub batch_weight: u64,
    /// Least time between two batches, in which items gather for the second.
    pub interval: Duration,
    /// Time that further items have to join a batch after one of many items.
    pub linger: Linger,
    /// Key whose items take turns with those of other keys; those of one key stay in order.
    pub key: fn(&T) -> K,
    /// Bytes that an item holds.
    pub bytes: fn(&T) -> usize,
    /// Work that an item causes. The keys' shares of the batches are equal in it.
    pub weight: fn(&T) -> u64,
}

/// Wait of a busy queue for further items: fewer and larger batches do the same work at less cost.
#[derive(Debug, Clone, Copy)]
pub struct Linger {
    /// Items of the batch before, from which on the queue is busy.
    pub after_items: usize,
    /// The wait.
    pub time: Duration,
}

impl Linger {
    /// Every batch is taken at once.
    pub const NONE: Self = Self { after_items: usize::MAX, time: Duration::ZERO };
}

impl<T> QueueConfig<T> {
    /// Bounds for small items of constant size, first come first served.
    #[must_use]
    pub const fn new(name: &'static str, max_items: usize, batch_items: usize) -> Self {
        Self {
            name,
            max_items,
            key_share: 1,
            max_bytes: u32::MAX,
            batch_items,
            batch_bytes: usize::MAX,
            batch_weight: u64::MAX,
            interval: Duration::ZERO,
            linger: Linger::NONE,
            key: |_| (),
            bytes: |_| size_of::<T>(),
            weight: |_| 1,
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
pub fn queue<T, K: Copy + Eq + Hash>(config: QueueConfig<T, K>) -> (BatchSender<T, K>, Batches<T, K>) {
    let (items, receiver) = mpsc::channel(config.max_items);
    let bytes = Arc::new(Semaphore::new(config.max_bytes as usize));
    let shares = Arc::new(Shares::new(&config));
    let (max_bytes, bytes_of, key_of) = (config.max_bytes, config.bytes, config.key);
    let sender =
        BatchSender { name: config.name, items, bytes, max_bytes, bytes_of, key_of, shares: Arc::clone(&shares) };
    (
        sender,
        Batches { items: receiver, turns: Turns::default(), next_at: Instant::now(), last_items: 0, shares, config },
    )
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
    /// It counts in the share of its key.
    is_counted: bool,
}

/// Waiting items by key, where a key may hold only a part of the queue.
#[derive(Debug)]
struct Shares<K> {
    /// Items and bytes of one key at most. `None`: a key may fill the queue, and nothing is counted.
    most: Option<(usize, usize)>,
    /// Items and bytes that wait.
    of_key: Mutex<HashMap<K, (usize, usize)>>,
}

impl<K: Copy + Eq + Hash> Shares<K> {
    fn new<T>(config: &QueueConfig<T, K>) -> Self {
        let part = config.key_share.max(1) as usize;
        let most = (part > 1).then(|| (config.max_items / part, config.max_bytes as usize / part));
        Self { most, of_key: Mutex::default() }
    }

    /// Counts an item; returns false when its key has its share. A key without waiting items may queue one of any size.
    fn take(&self, key: K, item_bytes: usize) -> bool {
        let Some((most_items, most_bytes)) = self.most else { return true };
        let mut of_key = self.of_key.lock().unwrap_or_else(PoisonError::into_inner);
        let (items, bytes) = of_key.entry(key).or_default();
        let fits = *items == 0 || *items < most_items && bytes.saturating_add(item_bytes) <= most_bytes;
        if fits {
            *items += 1;
            *bytes = bytes.saturating_add(item_bytes);
        }
        fits
    }

    fn give_back(&self, key: K, item_bytes: usize) {
        if self.most.is_none() {
            return;
        }
        let mut of_key = self.of_key.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((items, bytes)) = of_key.get_mut(&key) {
            *items -= 1;
            *bytes = bytes.saturating_sub(item_bytes);
            if *items == 0 {
                of_key.remove(&key);
            }
        }
    }
}

/// Sending end of a queue.
#[derive(Debug)]
pub struct BatchSender<T, K = ()> {
    name: &'static str,
    items: mpsc::Sender<Waiting<T>>,
    bytes: Arc<Semaphore>,
    max_bytes: u32,
    bytes_of: fn(&T) -> usize,
    key_of: fn(&T) -> K,
    shares: Arc<Shares<K>>,
}

impl<T, K: Copy + Eq + Hash> BatchSender<T, K> {
    /// Queues an item without waiting.
    ///
    /// # Errors
    /// When the queue is full, or its key has its share; the item is dropped.
    pub fn try_send(&self, item: T) -> Result<(), QueueFull> {
        let (key, bytes) = ((self.key_of)(&item), (self.bytes_of)(&item));
        let queued = if self.shares.take(key, bytes) {
            let queued = self.waiting_at_once(item).and_then(|one| self.items.try_send(one).map_err(|_| QueueFull));
            queued.inspect_err(|_| self.shares.give_back(key, bytes))
        } else {
            Err(QueueFull)
        };
        if queued.is_err() {
            metrics::counter!(QUEUE_REFUSED, "queue" => self.name).increment(1);
        }
        queued
    }

    fn waiting_at_once(&self, item: T) -> Result<Waiting<T>, QueueFull> {
        let (bytes, share) = self.share_of(&item);
        let share = Arc::clone(&self.bytes).try_acquire_many_owned(share).map_err(|_| QueueFull)?;
        Ok(Waiting { item, bytes, _share: Some(share), is_counted: true })
    }

    /// Queues an item, waiting for room. It does not count in its key's share.
    ///
    /// # Errors
    /// When the task that empties the queue has ended; the item is dropped.
    pub async fn send(&self, item: T) -> Result<(), QueueFull> {
        let (bytes, share) = self.share_of(&item);
        let share = Arc::clone(&self.bytes).acquire_many_owned(share).await.map_err(|_| QueueFull)?;
        self.items.send(Waiting { item, bytes, _share: Some(share), is_counted: false }).await.map_err(|_| QueueFull)
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

impl<T, R, K: Copy + Eq + Hash> BatchSender<Request<T, R>, K> {
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
    /// Items of the last batch.
    last_items: usize,
    shares: Arc<Shares<K>>,
    config: QueueConfig<T, K>,
}

impl<T, K: Copy + Eq + Hash> Batches<T, K> {
    /// Waits for items and takes the next batch; `None` when all senders are dropped and nothing waits.
    pub async fn next(&mut self) -> Option<Vec<T>> {
        if self.turns.waiting == 0 {
            let first = self.items.recv().await?;
            // Sorted before any further wait: a caller that drops this future loses no item.
            self.add(first);
        }
        if !self.config.interval.is_zero() {
            tokio::time::sleep_until(self.next_at).await;
            self.next_at = Instant::now() + self.config.interval;
        }
        let is_busy = self.last_items >= self.config.linger.after_items;
        // A batch that is full already gains nothing by the wait.
        if is_busy && self.turns.waiting + self.items.len() < self.config.batch_items {
            tokio::time::sleep(self.config.linger.time).await;
        }
        // The rest stays in the channel, whose bound refuses further items.
        while self.turns.waiting < self.config.max_items
            && let Ok(item) = self.items.try_recv()
        {
            self.add(item);
        }
        let batch = self.turns.take(&self.config);
        self.last_items = batch.len();
        Some(self.hand_out(batch))
    }

    /// Takes a batch of the waiting items of one key.
    pub fn take_key(&mut self, key: K) -> Vec<T> {
        let batch = self.turns.take_key(key, &self.config);
        self.hand_out(batch)
    }

    /// Returns items of the last batch to the front of their keys, in their order.
    pub fn put_back(&mut self, items: Vec<T>) {
        // In reverse, because each goes to the front.
        for item in items.into_iter().rev() {
            let (key, bytes) = ((self.config.key)(&item), (self.config.bytes)(&item));
            // Its shares ended when it was handed out. It must not wait for them behind newer items.
            self.turns.push_front(key, Waiting { item, bytes, _share: None, is_counted: false });
        }
    }

    fn add(&mut self, waiting: Waiting<T>) {
        self.turns.push_back((self.config.key)(&waiting.item), waiting);
    }

    fn hand_out(&self, batch: Vec<Waiting<T>>) -> Vec<T> {
        let queue = self.config.name;
        metrics::histogram!(BATCH_ITEMS, "queue" => queue).record(batch.len() as f64);
        metrics::gauge!(QUEUE_ITEMS, "queue" => queue).set((self.turns.waiting + self.items.len()) as f64);
        let give_back = |waiting: &Waiting<T>| {
            if waiting.is_counted {
                self.shares.give_back((self.config.key)(&waiting.item), waiting.bytes);
            }
        };
        batch.into_iter().inspect(give_back).map(|waiting| waiting.item).collect()
    }
}

/// Items in the order in which they will be taken: the keys in turn by weight, the items of a key first come first
/// served.
///
/// This is fair queueing by virtual time: each taken item moves the next turn of its key back by its weight. A key
/// whose items all weigh 1 has every n-th turn among n keys; one whose items weigh 100 has a hundredth as many.
#[derive(Debug)]
struct Turns<T, K> {
    /// Keys with items by the virtual time of their next turn; equal times in the order of the tickets.
    order: BTreeMap<(u64, u64), K>,
    of_key: HashMap<K, Line<T>>,
    /// Virtual time of the last turn. A key without waiting items has no claim on the past: it starts here.
    now: u64,
    next_ticket: u64,
    waiting: usize,
}

/// Waiting items of one key, and its place in the order.
#[derive(Debug)]
struct Line<T> {
    items: VecDeque<Waiting<T>>,
    place: (u64, u64),
}

impl<T, K> Default for Turns<T, K> {
    fn default() -> Self {
        Self { order: BTreeMap::new(), of_key: HashMap::new(), now: 0, next_ticket: 0, waiting: 0 }
    }
}

impl<T, K: Copy + Eq + Hash> Turns<T, K> {
    /// Returns the items of a key, which gets the last turn of the present time if it has none yet.
    fn items_of(&mut self, key: K) -> &mut VecDeque<Waiting<T>> {
        self.waiting += 1;
        let (order, next_ticket, now) = (&mut self.order, &mut self.next_ticket, self.now);
        let line = self.of_key.entry(key).or_insert_with(|| {
            let place = (now, *next_ticket);
            *next_ticket += 1;
            order.insert(place, key);
            Line { items: VecDeque::new(), place }
        });
        &mut line.items
    }

    fn push_back(&mut self, key: K, item: Waiting<T>) {
        self.items_of(key).push_back(item);
    }

    fn push_front(&mut self, key: K, item: Waiting<T>) {
        self.items_of(key).push_front(item);
    }

    /// Takes the next item of a key, and moves its turn back by the item's weight. Returns `None` if the item would
    /// exceed the room of the batch.
    fn take_one(&mut self, key: K, room: &mut Room<'_, T, K>) -> Option<Waiting<T>> {
        let line = self.of_key.get_mut(&key)?;
        let item = line.items.pop_front_if(|item| room.admits(item))?;
        self.waiting -= 1;
        self.order.remove(&line.place);
        if line.items.is_empty() {
            self.of_key.remove(&key);
        } else {
            // At least 1: with items of no weight a key would keep its turn for ever.
            let weight = (room.config.weight)(&item.item).max(1);
            line.place = (self.now.saturating_add(weight), self.next_ticket);
            self.next_ticket += 1;
            self.order.insert(line.place, key);
        }
        room.use_for(&item);
        Some(item)
    }

    /// Takes a batch, the keys in turn.
    fn take(&mut self, config: &QueueConfig<T, K>) -> Vec<Waiting<T>> {
        let mut batch = Vec::with_capacity(config.batch_items.min(self.waiting));
        let mut room = Room::new(config);
        while let Some(((at, _), key)) = self.order.first_key_value().map(|(place, key)| (*place, *key)) {
            self.now = self.now.max(at);
            // The key keeps its place and is first in the next batch: smaller items of other keys must not pass it
            // again and again.
            let Some(item) = self.take_one(key, &mut room) else { break };
            batch.push(item);
        }
        batch
    }

    /// Takes a batch of one key.
    fn take_key(&mut self, key: K, config: &QueueConfig<T, K>) -> Vec<Waiting<T>> {
        let mut room = Room::new(config);
        std::iter::from_fn(|| self.take_one(key, &mut room)).collect()
    }
}

/// Room that is left in a batch.
struct Room<'a, T, K> {
    config: &'a QueueConfig<T, K>,
    items: usize,
    bytes: usize,
    weight: u64,
}

impl<'a, T, K> Room<'a, T, K> {
    fn new(config: &'a QueueConfig<T, K>) -> Self {
        Self { config, items: 0, bytes: 0, weight: 0 }
    }

    /// The first item is always admitted: only it may hold more bytes than a batch may.
    fn admits(&self, item: &Waiting<T>) -> bool {
        self.items == 0
            || self.items < self.config.batch_items
                && self.weight < self.config.batch_weight
                && self.bytes.saturating_add(item.bytes) <= self.config.batch_bytes
    }

    fn use_for(&mut self, item: &Waiting<T>) {
        self.items += 1;
        self.bytes = self.bytes.saturating_add(item.bytes);
        self.weight = self.weight.saturating_add((self.config.weight)(&item.item));
    }
}

#[cfg(test)]
mod tests;
