//! What tries have come to, many in one transaction: those that ended while the last one was under way.

use std::{collections::HashSet, time::Duration};

use relay_domain::{AgentId, WorkspaceScope, event, metric_names};
use relay_store::{
    Store,
    events::EventBody,
    push_record::{Outcome, Tried},
};
use tokio::sync::{mpsc, oneshot};

use crate::Engine;

/// Tries that may wait to be recorded; beyond it their tasks wait.
const QUEUE: usize = 8192;
/// Tries of one transaction.
const AT_ONCE: usize = 1024;
/// How often a transaction that failed is tried again. What is not recorded in the end is tried again by whoever
/// serves the mailbox next, under the same delivery id.
const TIMES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

type Waiting = (Tried, oneshot::Sender<bool>);

/// The way to the one who records.
pub(super) struct Recorder {
    sender: mpsc::Sender<Waiting>,
}

impl Recorder {
    pub(super) fn start(engine: Engine, owner: i64) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        tokio::spawn(run(engine, owner, queue));
        Self { sender }
    }

    /// Hands a try over. The answer tells, once it is recorded, whether the mailbox is still served here.
    pub(super) async fn record(&self, tried: Tried) -> oneshot::Receiver<bool> {
        let (reply, answer) = oneshot::channel();
        // Its task is gone only with the process.
        let _ = self.sender.send((tried, reply)).await;
        answer
    }
}

async fn run(engine: Engine, owner: i64, mut queue: mpsc::Receiver<Waiting>) {
    let store = engine.store().alone();
    let mut waiting: Vec<Waiting> = Vec::with_capacity(AT_ONCE);
    while queue.recv_many(&mut waiting, AT_ONCE).await > 0 {
        let (tries, replies): (Vec<Tried>, Vec<oneshot::Sender<bool>>) = waiting.drain(..).unzip();
        let recorded = write(&engine, &store, owner, &tries).await;
        for (tried, reply) in tries.iter().zip(replies) {
            let key = (tried.mailbox.scope, tried.mailbox.agent_id);
            let is_ours = recorded.as_ref().is_some_and(|recorded| !recorded.contains(&key));
            let _ = reply.send(is_ours);
        }
    }
}

/// The mailboxes that are no longer served here; `None` when nothing could be written.
async fn write(
    engine: &Engine,
    store: &Store,
    owner: i64,
    tries: &[Tried],
) -> Option<HashSet<(WorkspaceScope, AgentId)>> {
    for time in 0..TIMES {
        match store.record_tries(owner, tries, time > 0, engine.now()).await {
            Ok(done) => {
                count(tries);
                done.recorded.into_iter().for_each(|recorded| engine.announce(recorded));
                tell_senders(engine, tries, &done.lost);
                return Some(done.lost);
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "tries were not recorded");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    None
}

/// Senders hear of deliveries that were given up.
fn tell_senders(engine: &Engine, tries: &[Tried], lost: &HashSet<(WorkspaceScope, AgentId)>) {
    for tried in tries.iter().filter(|tried| matches!(tried.outcome, Outcome::Dead { .. })) {
        let scope = tried.mailbox.scope;
        let (Some(sender), false) = (tried.sender, lost.contains(&(scope, tried.mailbox.agent_id))) else { continue };
        for failed in tried.events.iter().filter(|failed| failed.kind == event::DELIVERY_FAILED) {
            if let EventBody::Data(data) = &failed.body {
                engine.hints().notify(scope, vec![sender], "agent", event::DELIVERY_FAILED, data.clone());
            }
        }
    }
}

fn count(tries: &[Tried]) {
    for tried in tries {
        let outcome = match tried.outcome {
            Outcome::Delivered => "delivered",
            Outcome::Acked => "acked",
            Outcome::Retry { .. } => "failed",
            Outcome::Dead { reason } => {
                metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
                "dead"
            }
            Outcome::Disabled { .. } => "gone",
        };
        metrics::counter!(metric_names::PUSH_ATTEMPTS, "outcome" => outcome).increment(1);
        metrics::histogram!(metric_names::PUSH_SECONDS).record(f64::from(tried.attempt.latency_ms) / 1000.0);
    }
}
