//! Batched reads of mailboxes: one statement serves the requests that arrived during the previous one.

use relay_domain::{PushWorkerId, mailboxes::stream::Seq};
use relay_store::{
    Store, StoreError,
    push::{mailboxes::LeasedMailbox, pages::PushPage},
};
use tokio::sync::{mpsc, oneshot};

use crate::Engine;

/// Bound of the queue; every task has one request at most.
const QUEUE: usize = 8192;
/// Mailboxes per read. With 50 rows of up to 64 KiB each that may be large; most have few and small ones.
const BATCH: usize = 32;
/// Older rows have expired, whatever their workspace's TTL (six days at most).
const OLDEST_LIVE_ROW: chrono::Duration = chrono::Duration::days(7);

struct Request {
    mailbox: LeasedMailbox,
    from: Seq,
    reply: oneshot::Sender<Option<PushPage>>,
}

pub(super) struct Reader {
    sender: mpsc::Sender<Request>,
}

impl Reader {
    pub(super) fn start(engine: Engine, owner: PushWorkerId) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        engine.inner.tasks.clone().spawn("push-reader", run(engine, owner, queue));
        Self { sender }
    }

    /// Completes when the reader's task has ended.
    pub(super) async fn stopped(&self) {
        self.sender.closed().await;
    }

    /// Requests one page of a mailbox behind `from`. The reply is `None`, or none comes, when storage is unavailable.
    pub(super) async fn request_page(&self, mailbox: &LeasedMailbox, from: Seq) -> oneshot::Receiver<Option<PushPage>> {
        let (reply, answer) = oneshot::channel();
        // Fails only when the task has ended, and then the worker stops.
        let _ = self.sender.send(Request { mailbox: mailbox.clone(), from, reply }).await;
        answer
    }
}

async fn run(engine: Engine, owner: PushWorkerId, mut queue: mpsc::Receiver<Request>) {
    let store = engine.store().with_dedicated_connection();
    let mut requests = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut requests, BATCH).await > 0 {
        let pages = read_pages(&engine, &store, owner, &requests).await;
        for (request, page) in requests.drain(..).zip(pages) {
            let _ = request.reply.send(page);
        }
    }
}

/// Reads a page for each request. `None` where the read failed: the task of the mailbox repeats it.
async fn read_pages(
    engine: &Engine,
    store: &Store,
    owner: PushWorkerId,
    requests: &[Request],
) -> Vec<Option<PushPage>> {
    let mailboxes: Vec<(LeasedMailbox, Seq)> = requests.iter().map(|r| (r.mailbox.clone(), r.from)).collect();
    let error = match store.read_push_pages(owner, &mailboxes, engine.now() - OLDEST_LIVE_ROW).await {
        Ok(pages) => return pages.into_iter().map(Some).collect(),
        Err(error) => error,
    };
    match (&error, requests) {
        (StoreError::Corrupt { .. }, [request]) => tracing::error!(
            agent.id = %request.mailbox.agent_id,
            error = &error as &dyn std::error::Error,
            "a mailbox has a corrupt row, its deliveries wait"
        ),
        // Only the mailbox with the corrupt row may wait, so the others are read without it.
        (StoreError::Corrupt { .. }, _) => {
            let mut pages = Vec::with_capacity(requests.len());
            for request in requests {
                pages.extend(Box::pin(read_pages(engine, store, owner, std::slice::from_ref(request))).await);
            }
            return pages;
        }
        _ => tracing::debug!(error = &error as &dyn std::error::Error, "failed to read mailboxes"),
    }
    requests.iter().map(|_| None).collect()
}
