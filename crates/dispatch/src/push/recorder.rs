//! Batched records of attempts: one transaction takes those that ended during the previous one.

use std::{collections::HashSet, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{
    metric_names,
    push::{
        DEFAULT_RETRY_DELAY,
        attempt::{AttemptOutcome, HttpAttempt, PushAttempt, RecordingPass},
        mailbox::MailboxKey,
    },
};
use relay_tasks::{
    TaskSet,
    batches::{BatchSender, Batches, QueueConfig, Request, queue},
};
use tokio::sync::oneshot;

use super::queue::PushQueue;

/// Attempts that wait for their record; beyond it tasks wait. Each holds at most the stored part of an answer.
const ATTEMPTS: QueueConfig<QueuedAttempt> = QueueConfig::new("push_attempts", 8192, 1024);
/// Retries of a failed transaction. An attempt that stays unrecorded is repeated by the next worker, under the same
/// delivery id.
const MAX_RETRIES: u32 = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Error in the attempt log when storage refused the record.
const UNRECORDABLE_ERROR: &str = "the answer could not be recorded";

type QueuedAttempt = Request<PushAttempt, bool>;
/// Mailboxes that belong to other workers now.
type LostMailboxes = HashSet<MailboxKey>;

pub(super) struct Recorder {
    sender: BatchSender<QueuedAttempt>,
}

impl Recorder {
    pub(super) fn start(storage: Arc<dyn PushQueue>, tasks: &TaskSet) -> Self {
        let (sender, attempts) = queue(ATTEMPTS);
        tasks.spawn("push-recorder", run(storage, attempts));
        Self { sender }
    }

    /// Completes when the recorder's task has ended.
    pub(super) async fn stopped(&self) {
        self.sender.closed().await;
    }

    /// Queues an attempt. The reply comes once it is recorded: `true` if the mailbox still belongs to this worker.
    pub(super) async fn record(&self, attempt: PushAttempt) -> oneshot::Receiver<bool> {
        self.sender.request(attempt).await
    }
}

async fn run(storage: Arc<dyn PushQueue>, mut queued: Batches<QueuedAttempt>) {
    while let Some(batch) = queued.next().await {
        let (attempts, replies) = Request::split(batch);
        let lost = match record_batch(&*storage, &attempts).await {
            Some(lost) => lost,
            // Storage refuses one of the attempts: recorded one by one, the others are not held back.
            None => record_one_by_one(&*storage, &attempts).await,
        };
        for (attempt, reply) in attempts.iter().zip(replies) {
            // Fails when the task of the mailbox has ended, which then needs no answer.
            let _ = reply.send(!lost.contains(&attempt.mailbox.key()));
        }
    }
}

/// Records a batch. Returns the lost mailboxes: all of them while storage stays unavailable. `None` when it refuses the
/// batch.
async fn record_batch(storage: &dyn PushQueue, attempts: &[PushAttempt]) -> Option<LostMailboxes> {
    let mut pass = RecordingPass::First;
    for _ in 0..MAX_RETRIES {
        match storage.record(attempts, pass).await {
            Ok(lost) => {
                count_outcomes(attempts);
                return Some(lost);
            }
            Err(error) if error.is_permanent() => {
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
    // Their tasks go back to the last recorded row, so that none is passed without a record.
    Some(attempts.iter().map(|attempt| attempt.mailbox.key()).collect())
}

/// Finds the attempts that storage refuses, and records only that they were made.
async fn record_one_by_one(storage: &dyn PushQueue, attempts: &[PushAttempt]) -> LostMailboxes {
    let mut lost = LostMailboxes::new();
    let mut is_any_refused = false;
    for attempt in attempts {
        if let Some(own) = record_batch(storage, std::slice::from_ref(attempt)).await {
            lost.extend(own);
            continue;
        }
        // Its task assumes another outcome: it must read again.
        lost.insert(attempt.mailbox.key());
        is_any_refused |= record_batch(storage, &[without_answer(attempt, storage.now())]).await.is_none();
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
        // These outcomes do not carry the number of failures, so the schedule begins again.
        AttemptOutcome::Delivered | AttemptOutcome::Acked | AttemptOutcome::DeadLettered { .. } => 1,
    };
    PushAttempt {
        http: HttpAttempt { answer: None, error: Some(UNRECORDABLE_ERROR.to_owned()), ..attempt.http.clone() },
        outcome: AttemptOutcome::Retry { at: now + DEFAULT_RETRY_DELAY, retry_no },
        pushed_seq: None,
        ..attempt.clone()
    }
}

fn count_outcomes(attempts: &[PushAttempt]) {
    for attempt in attempts {
        let outcome = match attempt.outcome {
            AttemptOutcome::Delivered => "delivered",
            AttemptOutcome::Acked => "acked",
            AttemptOutcome::Retry { .. } => "failed",
            AttemptOutcome::DeadLettered { .. } => "dead",
            AttemptOutcome::Disabled { .. } => "gone",
        };
        metrics::counter!(metric_names::PUSH_ATTEMPTS, "outcome" => outcome).increment(1);
        metrics::histogram!(metric_names::PUSH_SECONDS).record(f64::from(attempt.http.latency_ms) / 1000.0);
    }
}
