//! [`queue`]: bounded queue with one receiver that takes memory for what it holds.
//!
//! A channel of tokio has the slots of 32 items and half a kilobyte besides from its start. A gateway has three queues
//! for each of its thousands of sockets, and nearly all of them are empty.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use tokio::task::coop::cooperative;

/// Capacity that an empty queue keeps, so that a socket with some traffic does not allocate for each item.
const KEPT_CAPACITY: usize = 8;

/// Creates a queue of at most `limit` items.
pub(super) fn queue<T>(limit: usize) -> (Sender<T>, Receiver<T>) {
    let state = State { items: VecDeque::new(), receiver: None, senders: 1, is_closed: false };
    let shared = Arc::new(Shared { limit, state: Mutex::new(state) });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

#[derive(Debug)]
struct Shared<T> {
    limit: usize,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    /// Task that waits for an item or for the end of the senders.
    receiver: Option<Waker>,
    senders: usize,
    /// The receiver was dropped.
    is_closed: bool,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn pop(&mut self) -> Option<T> {
        let item = self.items.pop_front();
        if self.items.is_empty() && self.items.capacity() > KEPT_CAPACITY {
            self.items.shrink_to(KEPT_CAPACITY);
        }
        item
    }
}

/// Sending side. Its clones send to the same queue.
#[derive(Debug)]
pub(super) struct Sender<T>(Arc<Shared<T>>);

impl<T> Sender<T> {
    /// Appends an item. False if the queue is full or its receiver was dropped.
    pub(super) fn try_send(&self, item: T) -> bool {
        self.push(item, self.0.limit)
    }

    /// Appends an item even if the queue is full. False if its receiver was dropped.
    pub(super) fn send_above_limit(&self, item: T) -> bool {
        self.push(item, usize::MAX)
    }

    fn push(&self, item: T, limit: usize) -> bool {
        let mut state = self.0.lock();
        if state.is_closed || state.items.len() >= limit {
            return false;
        }
        state.items.push_back(item);
        let receiver = state.receiver.take();
        // Woken without the lock: the receiver may run at once on another thread and would wait for it.
        drop(state);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
        true
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.lock().senders += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.senders -= 1;
        let receiver = if state.senders == 0 { state.receiver.take() } else { None };
        drop(state);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
    }
}

/// Receiving side.
#[derive(Debug)]
pub(super) struct Receiver<T>(Arc<Shared<T>>);

impl<T> Receiver<T> {
    /// Returns the next item, or `None` once the queue is empty and every sender was dropped. May be cancelled.
    ///
    /// A task that always finds an item yields now and then, as with channels of tokio: the task that writes to its
    /// socket may be next on the same thread.
    pub(super) async fn recv(&mut self) -> Option<T> {
        cooperative(poll_fn(|context| self.poll_recv(context))).await
    }

    fn poll_recv(&mut self, context: &Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.lock();
        if let Some(item) = state.pop() {
            return Poll::Ready(Some(item));
        }
        if state.senders == 0 {
            return Poll::Ready(None);
        }
        if !state.receiver.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            state.receiver = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Returns the next item if there is one.
    pub(super) fn try_recv(&mut self) -> Option<T> {
        self.0.lock().pop()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        let items = std::mem::take(&mut state.items);
        drop(state);
        // Outside of the lock: an item may hold a sender of this queue.
        drop(items);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn items_arrive_in_order_up_to_the_limit() {
        let (sender, mut receiver) = queue(2);
        assert_eq!([1, 2, 3].map(|item| sender.try_send(item)), [true, true, false]);
        assert!(sender.send_above_limit(4));
        assert_eq!([receiver.try_recv(), receiver.try_recv()], [Some(1), Some(2)]);
        assert!(sender.try_send(5));
        let rest = std::iter::from_fn(|| receiver.try_recv());
        assert_eq!(rest.collect::<Vec<_>>(), [4, 5]);
    }

    #[tokio::test]
    async fn a_waiting_receiver_is_woken_by_an_item_and_by_the_end_of_the_senders() {
        let (sender, mut receiver) = queue(1);
        assert!(receiver.recv().now_or_never().is_none(), "nothing is there");
        let receiving = tokio::spawn(async move { [receiver.recv().await, receiver.recv().await] });
        tokio::task::yield_now().await;
        assert!(sender.clone().try_send(7), "the end of a clone is not the end of the queue");
        tokio::task::yield_now().await;
        drop(sender);
        assert_eq!(receiving.await.unwrap(), [Some(7), None]);
    }

    #[test]
    fn nothing_is_accepted_without_a_receiver() {
        let (sender, receiver) = queue(1);
        drop(receiver);
        assert!(!sender.try_send(1) && !sender.send_above_limit(2));
    }

    #[test]
    fn an_emptied_queue_returns_its_memory() {
        let (sender, mut receiver) = queue(1000);
        assert_eq!(sender.0.lock().items.capacity(), 0);
        (0..1000).for_each(|item| assert!(sender.try_send(item)));
        while receiver.try_recv().is_some() {}
        assert!(sender.0.lock().items.capacity() <= KEPT_CAPACITY);
    }
}
