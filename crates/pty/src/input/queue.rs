//! The write queue of one terminal.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::{Bytes, BytesMut};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::{Injection, WriteReceipt};
use crate::{Limits, PtyError};

/// An entry of one terminal's write queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(u64);

/// User input and injections in the order of their arrival, and answers of the terminal ahead of them.
#[derive(Debug)]
pub(crate) struct InputQueue {
    state: Mutex<State>,
    changed: Notify,
    input_room: QueueBound,
    injection_room: QueueBound,
    injection_slots: QueueBound,
    answer_bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    answers: BytesMut,
    entries: VecDeque<Entry>,
    last_id: u64,
    closed: bool,
    dropped_answers: u64,
}

/// Bound of a kind of entries, in bytes or in entries.
#[derive(Debug)]
struct QueueBound {
    semaphore: Arc<Semaphore>,
    limit: usize,
}

impl QueueBound {
    fn new(limit: usize) -> Self {
        Self { semaphore: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Units to take. An entry above the bound takes all of it, that is, it waits until it is alone.
    fn units(&self, amount: usize) -> u32 {
        u32::try_from(amount.min(self.limit)).unwrap_or(u32::MAX)
    }

    fn used_units(&self) -> usize {
        self.limit - self.semaphore.available_permits().min(self.limit)
    }
}

/// One entry, which is written whole before the next begins.
#[derive(Debug)]
struct Entry {
    ticket: EntryTicket,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Keys(Bytes),
    Injection(Injection),
}

/// The writer's side of a [`WriteTicket`].
#[derive(Debug)]
pub(crate) struct EntryTicket {
    pub(crate) id: WriteId,
    pub(crate) done: oneshot::Sender<Result<WriteReceipt, PtyError>>,
    /// Held until the entry was written.
    _room: Vec<OwnedSemaphorePermit>,
}

/// The next thing to write.
#[derive(Debug)]
pub(crate) enum NextWrite {
    Answers(Bytes),
    Keys(EntryTicket, Bytes),
    Injection(EntryTicket, Injection),
}

/// An entry's place in the queue. Dropping it leaves the entry there.
#[derive(Debug)]
pub struct WriteTicket {
    id: WriteId,
    queue: Arc<InputQueue>,
    done: oneshot::Receiver<Result<WriteReceipt, PtyError>>,
}

impl WriteTicket {
    /// The entry's id, as [`crate::TerminalEvent`]s name it.
    pub fn id(&self) -> WriteId {
        self.id
    }

    /// Waits until the terminal has taken the whole entry. Safe to cancel; call it once.
    pub async fn written(&mut self) -> Result<WriteReceipt, PtyError> {
        // A closed queue drops its entries and with them the senders.
        (&mut self.done).await.unwrap_or(Err(PtyError::Ended))
    }

    /// Takes the entry out of the queue. False if its first byte may have been written: then it is written whole.
    pub fn withdraw(self) -> bool {
        self.queue.withdraw(self.id)
    }
}

impl InputQueue {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
            input_room: QueueBound::new(limits.input_bytes),
            injection_room: QueueBound::new(limits.injection_bytes),
            injection_slots: QueueBound::new(limits.injections),
            answer_bytes: limits.answer_bytes,
        }
    }

    /// Queues keys; waits for room. Safe to cancel: nothing is queued then.
    pub(crate) async fn push_keys(self: &Arc<Self>, keys: Bytes) -> Result<WriteTicket, PtyError> {
        let units = self.input_room.units(keys.len());
        // The semaphore serves its waiters in order, so keys keep the order in which callers began to wait.
        let room = self.input_room.semaphore.clone().acquire_many_owned(units).await.map_err(|_| PtyError::Ended)?;
        self.push(Work::Keys(keys), vec![room])
    }

    /// Queues an injection if there is room.
    pub(crate) fn push_injection(self: &Arc<Self>, injection: Injection) -> Result<WriteTicket, PtyError> {
        let mut room = Vec::with_capacity(2);
        for (bound, amount) in [(&self.injection_slots, 1), (&self.injection_room, injection.len())] {
            let taken = bound.semaphore.clone().try_acquire_many_owned(bound.units(amount));
            room.push(taken.map_err(|refused| match refused {
                tokio::sync::TryAcquireError::Closed => PtyError::Ended,
                tokio::sync::TryAcquireError::NoPermits => PtyError::InjectionQueueFull,
            })?);
        }
        self.push(Work::Injection(injection), room)
    }

    fn push(self: &Arc<Self>, work: Work, room: Vec<OwnedSemaphorePermit>) -> Result<WriteTicket, PtyError> {
        let (done, receiver) = oneshot::channel();
        let mut state = self.lock();
        // The room was taken before the lock: `close` may have emptied the list since.
        if state.closed {
            return Err(PtyError::Ended);
        }
        state.last_id += 1;
        let id = WriteId(state.last_id);
        state.entries.push_back(Entry { ticket: EntryTicket { id, done, _room: room }, work });
        drop(state);
        // The driver is the only waiter. A notification that finds it busy is kept for its next wait.
        self.changed.notify_one();
        Ok(WriteTicket { id, queue: self.clone(), done: receiver })
    }

    /// Takes an entry out of the queue. False if it is not there any more.
    pub(crate) fn withdraw(&self, id: WriteId) -> bool {
        let mut state = self.lock();
        let place = state.entries.iter().position(|entry| entry.ticket.id == id);
        place.and_then(|place| state.entries.remove(place)).is_some()
    }

    /// Queues answers of the terminal ahead of everything that has not begun. Drops them if too many wait.
    pub(crate) fn push_answers(&self, answers: &[u8]) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        // All of them or none: a program would take a part of an answer for keys.
        if state.answers.len() + answers.len() > self.answer_bytes {
            state.dropped_answers += 1;
            return;
        }
        state.answers.extend_from_slice(answers);
        drop(state);
        self.changed.notify_one();
    }

    /// Takes the next thing to write.
    pub(crate) fn take_next(&self) -> Option<NextWrite> {
        let mut state = self.lock();
        // Answers first: a program that asked usually waits for the answer before it reads other input.
        if !state.answers.is_empty() {
            return Some(NextWrite::Answers(std::mem::take(&mut state.answers).freeze()));
        }
        state.entries.pop_front().map(|Entry { ticket, work }| match work {
            Work::Keys(keys) => NextWrite::Keys(ticket, keys),
            Work::Injection(injection) => NextWrite::Injection(ticket, injection),
        })
    }

    /// Waits for a change since the last call.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Refuses further entries and fails all that wait with [`PtyError::Ended`].
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        // The flag first, under the lock of the lists: an entry whose caller has its room already is refused by `push`.
        state.closed = true;
        state.answers = BytesMut::new();
        state.entries = VecDeque::new();
        drop(state);
        for room in [&self.input_room, &self.injection_room, &self.injection_slots] {
            room.semaphore.close();
        }
        self.changed.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Bytes of user input and number of injections that were not written yet, and answers dropped so far.
    pub(crate) fn counts(&self) -> (usize, usize, u64) {
        (self.input_room.used_units(), self.injection_slots.used_units(), self.lock().dropped_answers)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Arc<InputQueue> {
        let limits = Limits { input_bytes: 4, injections: 2, answer_bytes: 8, ..Limits::default() };
        Arc::new(InputQueue::new(&limits))
    }

    fn keys(next: Option<NextWrite>) -> Bytes {
        match next {
            Some(NextWrite::Answers(bytes)) => bytes,
            Some(NextWrite::Keys(_, bytes)) => bytes,
            other => panic!("no bytes: {other:?}"),
        }
    }

    #[tokio::test]
    async fn answers_go_ahead_of_unbegun_entries() {
        let queue = queue();
        let _first = queue.push_keys("ab".into()).await.expect("room");
        queue.push_answers(b"x");
        queue.push_answers(b"y");
        queue.push_answers(b"too much");
        assert_eq!(keys(queue.take_next()), "xy");
        assert_eq!(keys(queue.take_next()), "ab");
        assert!(queue.take_next().is_none());
        assert_eq!(queue.counts().2, 1);
    }

    #[tokio::test]
    async fn input_waits_for_room_and_a_large_entry_for_an_empty_queue() {
        let queue = queue();
        let _first = queue.push_keys("abc".into()).await.expect("room");
        let mut second = Box::pin(queue.push_keys("larger than the bound".into()));
        assert!(poll_once(&mut second).is_none());
        drop(queue.take_next());
        assert!(poll_once(&mut second).is_some_and(|ticket| ticket.is_ok()));
        assert_eq!(queue.counts().0, 4);
    }

    #[tokio::test]
    async fn too_many_injections_are_refused_and_a_closed_queue_fails_all() {
        let queue = queue();
        let mut first = queue.push_injection(Injection::new("a")).expect("room");
        let second = queue.push_injection(Injection::new("b")).expect("room");
        assert!(matches!(queue.push_injection(Injection::new("c")), Err(PtyError::InjectionQueueFull)));
        assert!(second.withdraw());
        assert_eq!(queue.counts().1, 1);
        queue.close();
        assert!(matches!(first.written().await, Err(PtyError::Ended)));
        assert!(matches!(queue.push_injection(Injection::new("c")), Err(PtyError::Ended)));
        assert!(matches!(queue.push_keys("c".into()).await, Err(PtyError::Ended)));
    }

    fn poll_once<T>(future: &mut std::pin::Pin<Box<impl Future<Output = T>>>) -> Option<T> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }
}
