//! Reads of mailboxes, many in one statement: those that were asked for while the last one was under way.

use relay_domain::session::Seq;
use relay_store::{push_mailboxes::TakenMailbox, push_read::PushPage};
use tokio::sync::{mpsc, oneshot};

use crate::Engine;

/// Reads that may wait; every task has one at most.
const QUEUE: usize = 8192;
/// Mailboxes of one read. With 50 rows each of up to 64 KiB that is much to hold; most have few and small ones.
const AT_ONCE: usize = 32;
/// Older rows have expired, whatever their workspace's TTL (six days at most).
const OLDEST_LIVE_ROW: chrono::Duration = chrono::Duration::days(7);

struct Request {
    mailbox: TakenMailbox,
    from: Seq,
    reply: oneshot::Sender<Option<PushPage>>,
}

/// The way to the one who reads.
pub(super) struct Reader {
    sender: mpsc::Sender<Request>,
}

impl Reader {
    pub(super) fn start(engine: Engine, owner: i64) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        tokio::spawn(run(engine, owner, queue));
        Self { sender }
    }

    /// Ends when the one who reads has.
    pub(super) async fn ended(&self) {
        self.sender.closed().await;
    }

    /// Asks for one page of a mailbox behind `from`. The answer is `None`, or none comes, when storage is away.
    pub(super) async fn ask(&self, mailbox: &TakenMailbox, from: Seq) -> oneshot::Receiver<Option<PushPage>> {
        let (reply, answer) = oneshot::channel();
        // Without its task the worker stops.
        let _ = self.sender.send(Request { mailbox: mailbox.clone(), from, reply }).await;
        answer
    }
}

async fn run(engine: Engine, owner: i64, mut queue: mpsc::Receiver<Request>) {
    let store = engine.store().alone();
    let mut requests = Vec::with_capacity(AT_ONCE);
    while queue.recv_many(&mut requests, AT_ONCE).await > 0 {
        let of: Vec<(TakenMailbox, Seq)> = requests.iter().map(|r| (r.mailbox.clone(), r.from)).collect();
        let mut pages = match store.read_push_pages(owner, &of, engine.now() - OLDEST_LIVE_ROW).await {
            Ok(pages) => pages.into_iter().map(Some).collect(),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "mailboxes were not read");
                Vec::new()
            }
        };
        pages.resize_with(requests.len(), || None);
        for (request, page) in requests.drain(..).zip(pages) {
            let _ = request.reply.send(page);
        }
    }
}
