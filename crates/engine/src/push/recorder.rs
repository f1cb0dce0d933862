//! What tries have come to, many in one transaction: those that ended while the last one was under way.

use std::{collections::HashSet, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, event, metric_names, push::RETRY_AFTER};
use relay_store::{
    Store, StoreError,
    events::EventBody,
    push_record::{Attempt, Outcome, RecordedTries, Tried},
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

/// What the log of a try says whose record Postgres refused.
const UNRECORDABLE: &str = "the answer could not be recorded";

type Waiting = (Tried, oneshot::Sender<bool>);
/// Mailboxes that are no longer served here.
type Lost = HashSet<(WorkspaceScope, AgentId)>;

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

    /// Ends when the one who records has.
    pub(super) async fn ended(&self) {
        self.sender.closed().await;
    }

    /// Hands a try over. The answer tells, once it is recorded, whether the mailbox is still served here.
    pub(super) async fn record(&self, tried: Tried) -> oneshot::Receiver<bool> {
        let (reply, answer) = oneshot::channel();
        // Without its task the worker stops.
        let _ = self.sender.send((tried, reply)).await;
        answer
    }
}

async fn run(engine: Engine, owner: i64, mut queue: mpsc::Receiver<Waiting>) {
    let store = engine.store().alone();
    let mut waiting: Vec<Waiting> = Vec::with_capacity(AT_ONCE);
    while queue.recv_many(&mut waiting, AT_ONCE).await > 0 {
        let (tries, replies): (Vec<Tried>, Vec<oneshot::Sender<bool>>) = waiting.drain(..).unzip();
        let lost = match write(&engine, &store, owner, &tries).await {
            Some(lost) => lost,
            None => write_one_by_one(&engine, &store, owner, &tries).await,
        };
        for (tried, reply) in tries.iter().zip(replies) {
            let _ = reply.send(!lost.contains(&key_of(tried)));
        }
    }
}

fn key_of(tried: &Tried) -> (WorkspaceScope, AgentId) {
    (tried.mailbox.scope, tried.mailbox.agent_id)
}

/// The mailboxes that are no longer served here: all of them if Postgres stays away. `None` when it refuses what is to
/// be written.
async fn write(engine: &Engine, store: &Store, owner: i64, tries: &[Tried]) -> Option<Lost> {
    for time in 0..TIMES {
        match store.record_tries(owner, tries, time > 0, engine.now()).await {
            Ok(mut done) => {
                count(tries, &done);
                std::mem::take(&mut done.recorded).into_iter().for_each(|recorded| engine.announce(recorded));
                tell_senders(engine, tries, &done);
                return Some(done.lost);
            }
            Err(error @ StoreError::Refused { .. }) => {
                tracing::error!(error = &error as &dyn std::error::Error, "a record of tries was refused");
                return None;
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "tries were not recorded");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    Some(tries.iter().map(key_of).collect())
}

/// Finds the tries that Postgres refuses among others, and records no more than that they were made.
async fn write_one_by_one(engine: &Engine, store: &Store, owner: i64, tries: &[Tried]) -> Lost {
    let mut lost = Lost::new();
    let mut is_any_refused = false;
    for tried in tries {
        if let Some(own) = write(engine, store, owner, std::slice::from_ref(tried)).await {
            lost.extend(own);
            continue;
        }
        // Its task goes by another outcome: it is to read again.
        lost.insert(key_of(tried));
        is_any_refused |= write(engine, store, owner, &[unrecordable(tried, engine.now())]).await.is_none();
    }
    // Then nothing is wrong with what was answered: it would be refused again at once, and posted again each time.
    if is_any_refused {
        tokio::time::sleep(PAUSE * TIMES).await;
    }
    lost
}

/// A try without anything of its answer. It comes back.
fn unrecordable(tried: &Tried, now: DateTime<Utc>) -> Tried {
    let retry_no = match tried.outcome {
        Outcome::Retry { retry_no, .. } | Outcome::Disabled { retry_no, .. } => retry_no,
        _ => 1,
    };
    Tried {
        attempt: Attempt { answer: None, error: Some(UNRECORDABLE.to_owned()), ..tried.attempt.clone() },
        outcome: Outcome::Retry { at: now + RETRY_AFTER, retry_no },
        pushed_seq: None,
        events: Vec::new(),
        ..tried.clone()
    }
}

/// Senders hear of deliveries that were given up.
fn tell_senders(engine: &Engine, tries: &[Tried], done: &RecordedTries) {
    for tried in tries.iter().filter(|tried| done.has_given_up(tried)) {
        let scope = tried.mailbox.scope;
        let Some(sender) = tried.sender else { continue };
        for failed in tried.events.iter().filter(|failed| failed.kind == event::DELIVERY_FAILED) {
            if let EventBody::Data(data) = &failed.body {
                engine.hints().notify(scope, vec![sender], "agent", event::DELIVERY_FAILED, data.clone());
            }
        }
    }
}

fn count(tries: &[Tried], done: &RecordedTries) {
    for tried in tries {
        let outcome = match tried.outcome {
            Outcome::Delivered => "delivered",
            Outcome::Acked => "acked",
            Outcome::Retry { .. } => "failed",
            Outcome::Dead { reason } => {
                if done.has_given_up(tried) {
                    metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
                }
                "dead"
            }
            Outcome::Disabled { .. } => "gone",
        };
        metrics::counter!(metric_names::PUSH_ATTEMPTS, "outcome" => outcome).increment(1);
        metrics::histogram!(metric_names::PUSH_SECONDS).record(f64::from(tried.attempt.latency_ms) / 1000.0);
    }
}
