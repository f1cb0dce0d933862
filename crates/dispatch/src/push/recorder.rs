//! Batched records of attempts: one transaction takes those that ended during the previous one.

use std::{collections::HashSet, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, PushWorkerId, WorkspaceScope, events::kind, metric_names, push::DEFAULT_RETRY_DELAY};
use relay_store::{
    Store, StoreError,
    events::EventBody,
    push::{
        attempts::{AttemptOutcome, HttpAttempt, PushAttempt, RecordingPass},
        record::RecordedAttempts,
    },
};
use tokio::sync::{mpsc, oneshot};

use crate::Engine;

/// Bound of the queue; beyond it tasks wait.
const QUEUE: usize = 8192;
const BATCH: usize = 1024;
/// Retries of a failed transaction. An attempt that stays unrecorded is repeated by the next worker, under the same
/// delivery id.
const MAX_RETRIES: u32 = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Error in the attempt log when Postgres refused the record.
const UNRECORDABLE_ERROR: &str = "the answer could not be recorded";

type QueuedAttempt = (PushAttempt, oneshot::Sender<bool>);
/// Mailboxes that belong to other workers now.
type LostMailboxes = HashSet<(WorkspaceScope, AgentId)>;

pub(super) struct Recorder {
    sender: mpsc::Sender<QueuedAttempt>,
}

impl Recorder {
    pub(super) fn start(engine: Engine, owner: PushWorkerId) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        engine.inner.tasks.clone().spawn("push-recorder", run(engine, owner, queue));
        Self { sender }
    }

    /// Completes when the recorder's task has ended.
    pub(super) async fn stopped(&self) {
        self.sender.closed().await;
    }

    /// Queues an attempt. The reply comes once it is recorded: `true` if the mailbox still belongs to this worker.
    pub(super) async fn record(&self, attempt: PushAttempt) -> oneshot::Receiver<bool> {
        let (reply, answer) = oneshot::channel();
        // Fails only when the task has ended, and then the worker stops.
        let _ = self.sender.send((attempt, reply)).await;
        answer
    }
}

async fn run(engine: Engine, owner: PushWorkerId, mut queue: mpsc::Receiver<QueuedAttempt>) {
    let store = engine.store().with_dedicated_connection();
    let mut waiting: Vec<QueuedAttempt> = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut waiting, BATCH).await > 0 {
        let (attempts, replies): (Vec<PushAttempt>, Vec<oneshot::Sender<bool>>) = waiting.drain(..).unzip();
        let lost = match record_batch(&engine, &store, owner, &attempts).await {
            Some(lost) => lost,
            None => record_one_by_one(&engine, &store, owner, &attempts).await,
        };
        for (attempt, reply) in attempts.iter().zip(replies) {
            // Fails when the task of the mailbox has ended, which then needs no answer.
            let _ = reply.send(!lost.contains(&mailbox_key(attempt)));
        }
    }
}

fn mailbox_key(attempt: &PushAttempt) -> (WorkspaceScope, AgentId) {
    (attempt.mailbox.scope, attempt.mailbox.agent_id)
}

/// Records a batch. Returns the lost mailboxes: all of them while Postgres stays unavailable. `None` when it refuses
/// the batch.
async fn record_batch(
    engine: &Engine,
    store: &Store,
    owner: PushWorkerId,
    attempts: &[PushAttempt],
) -> Option<LostMailboxes> {
    let mut pass = RecordingPass::First;
    for _ in 0..MAX_RETRIES {
        match store.record_attempts(owner, attempts, pass, engine.now()).await {
            Ok(mut done) => {
                count_outcomes(attempts, &done);
                std::mem::take(&mut done.recorded).into_iter().for_each(|recorded| engine.announce(recorded));
                notify_senders(engine, attempts, &done);
                return Some(done.lost);
            }
            Err(error @ StoreError::Refused { .. }) => {
                tracing::error!(error = &error as &dyn std::error::Error, "storage refused a batch of attempts");
                return None;
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to record attempts, will retry");
                // The commit may have happened although its answer was lost.
                pass = RecordingPass::Repeated;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
    Some(attempts.iter().map(mailbox_key).collect())
}

/// Finds the attempts that Postgres refuses, and records only that they were made.
async fn record_one_by_one(
    engine: &Engine,
    store: &Store,
    owner: PushWorkerId,
    attempts: &[PushAttempt],
) -> LostMailboxes {
    let mut lost = LostMailboxes::new();
    let mut is_any_refused = false;
    for attempt in attempts {
        if let Some(own) = record_batch(engine, store, owner, std::slice::from_ref(attempt)).await {
            lost.extend(own);
            continue;
        }
        // Its task assumes another outcome: it must read again.
        lost.insert(mailbox_key(attempt));
        is_any_refused |= record_batch(engine, store, owner, &[without_answer(attempt, engine.now())]).await.is_none();
    }
    // Then the response is not at fault: the record would be refused again at once, and the row posted again each time.
    if is_any_refused {
        tokio::time::sleep(RETRY_PAUSE * MAX_RETRIES).await;
    }
    lost
}

/// Returns the attempt without any data of its response. The row returns later.
fn without_answer(attempt: &PushAttempt, now: DateTime<Utc>) -> PushAttempt {
    let retry_no = match attempt.outcome {
        AttemptOutcome::Retry { retry_no, .. } | AttemptOutcome::Disabled { retry_no, .. } => retry_no,
        AttemptOutcome::Delivered | AttemptOutcome::Acked | AttemptOutcome::DeadLettered { .. } => 1,
    };
    PushAttempt {
        http: HttpAttempt { answer: None, error: Some(UNRECORDABLE_ERROR.to_owned()), ..attempt.http.clone() },
        outcome: AttemptOutcome::Retry { at: now + DEFAULT_RETRY_DELAY, retry_no },
        pushed_seq: None,
        events: Vec::new(),
        ..attempt.clone()
    }
}

/// Notifies senders of deliveries that became dead letters.
fn notify_senders(engine: &Engine, attempts: &[PushAttempt], done: &RecordedAttempts) {
    for attempt in attempts.iter().filter(|attempt| done.is_dead_lettered(attempt)) {
        let scope = attempt.mailbox.scope;
        let Some(sender) = attempt.sender else { continue };
        for failed in attempt.events.iter().filter(|failed| failed.kind == kind::DELIVERY_FAILED) {
            if let EventBody::Data(data) = &failed.body {
                engine.hints().notify(scope, vec![sender], "agent", kind::DELIVERY_FAILED, data.clone());
            }
        }
    }
}

fn count_outcomes(attempts: &[PushAttempt], done: &RecordedAttempts) {
    for attempt in attempts {
        let outcome = match attempt.outcome {
            AttemptOutcome::Delivered => "delivered",
            AttemptOutcome::Acked => "acked",
            AttemptOutcome::Retry { .. } => "failed",
            AttemptOutcome::DeadLettered { reason } => {
                if done.is_dead_lettered(attempt) {
                    metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
                }
                "dead"
            }
            AttemptOutcome::Disabled { .. } => "gone",
        };
        metrics::counter!(metric_names::PUSH_ATTEMPTS, "outcome" => outcome).increment(1);
        metrics::histogram!(metric_names::PUSH_SECONDS).record(f64::from(attempt.http.latency_ms) / 1000.0);
    }
}
