//! Batched reads of mailboxes: one statement serves the requests that arrived during the previous one.

use std::sync::Arc;

use relay_domain::{mailboxes::stream::Seq, push::mailbox::LeasedMailbox};
use relay_tasks::{
    TaskSet,
    batches::{BatchSender, Batches, QueueConfig, Request, queue},
};
use tokio::sync::oneshot;

use super::queue::{HeldPage, PushQueue};

/// Requests that wait for their page; every task has one at most. 24 pages of 50 messages of half a kilobyte
/// reserve a megabyte, the bound of one family's contents in one read: JSON counts with what it may take at most. Rows
/// beyond it are read for nothing, and again.
const REQUESTS: QueueConfig<PageRequest> = QueueConfig::new("push_pages", 8192, 24);

type PageRequest = Request<(LeasedMailbox, Seq), Option<HeldPage>>;

pub(super) struct Reader {
    sender: BatchSender<PageRequest>,
}

impl Reader {
    pub(super) fn start(storage: Arc<dyn PushQueue>, tasks: &TaskSet) -> Self {
        let (sender, requests) = queue(REQUESTS);
        tasks.spawn("push-reader", run(storage, requests));
        Self { sender }
    }

    /// Completes when the reader's task has ended.
    pub(super) async fn stopped(&self) {
        self.sender.closed().await;
    }

    /// Requests one page of a mailbox behind `from`. The reply is `None`, or none comes, when storage is
    /// unavailable or memory does not suffice.
    pub(super) async fn request_page(&self, mailbox: &LeasedMailbox, from: Seq) -> oneshot::Receiver<Option<HeldPage>> {
        self.sender.request((mailbox.clone(), from)).await
    }
}

async fn run(storage: Arc<dyn PushQueue>, mut requests: Batches<PageRequest>) {
    while let Some(batch) = requests.next().await {
        let (mailboxes, replies) = Request::split(batch);
        let pages = read_pages(&*storage, &mailboxes).await;
        for (reply, page) in replies.into_iter().zip(pages) {
            // Fails when the task of the mailbox has ended, which then needs no page.
            let _ = reply.send(page);
        }
    }
}

/// Reads a page for each request. `None` where the read failed: the task of the mailbox repeats it.
async fn read_pages(storage: &dyn PushQueue, mailboxes: &[(LeasedMailbox, Seq)]) -> Vec<Option<HeldPage>> {
    let error = match storage.read_pages(mailboxes).await {
        Ok(pages) => return pages,
        Err(error) => error,
    };
    match mailboxes {
        [(mailbox, _)] if error.is_permanent() => tracing::error!(
            agent.id = %mailbox.agent_id,
            error = &error as &dyn std::error::Error,
            "a mailbox cannot be read, its deliveries wait"
        ),
        // Only the mailbox that cannot be read may wait, so the others are read without it.
        _ if error.is_permanent() => {
            let mut pages = Vec::with_capacity(mailboxes.len());
            for one in mailboxes {
                pages.extend(Box::pin(read_pages(storage, std::slice::from_ref(one))).await);
            }
            return pages;
        }
        _ => tracing::debug!(error = &error as &dyn std::error::Error, "failed to read mailboxes"),
    }
    mailboxes.iter().map(|_| None).collect()
}
