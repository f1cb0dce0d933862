//! Consequence of a reported failure: a retry after a pause, a redrive as a new delivery, or a dead letter.
//!
//! Called by [`settlements`](super::settlements) within its transaction.

use chrono::{DateTime, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    mailboxes::{
        MessageLocation,
        dead_letter::{DeadLetterReason, MAX_REDRIVES},
        stream::Seq,
    },
    nodes::NodeKind,
    push::consumer_backoff,
};

use crate::{
    StoreError, StoreResult,
    codes::WS,
    connections::Transaction,
    mailboxes::expiry::DeadLetteredDelivery,
    messages::days::{day_of, day_of_id},
};

/// Way in which a retryable failure is retried. It depends on the kind of the agent's node.
#[derive(Debug)]
pub(crate) enum RetryMode {
    /// http_push and poll: consumers keep no record of past deliveries, so the same delivery may return.
    InPlace {
        /// Pauses in the node's retry schedule, if it has one.
        pauses: Option<i32>,
    },
    /// ws: brokers drop ids that they have seen, so a new delivery is needed.
    Redrive,
}

/// Consequence of a failure.
#[derive(Debug)]
pub(crate) enum FailureOutcome {
    /// The failure is recorded only.
    None,
    Retry {
        at: DateTime<Utc>,
        /// Failures so far.
        retry_no: i16,
    },
    /// A new delivery replaces it.
    Redriven {
        seq: Seq,
    },
    DeadLetter(DeadLetterReason),
}

// The head is bumped only if `old` has a row, so that an expired delivery leaves no gap in the seqs.
// No check of the depth: the failed row is settled in the same transaction, so the mailbox does not become fuller.
const REDRIVE: &str = "
WITH old AS (
    SELECT d.*, a.node_id AS located FROM deliveries d
      JOIN agents a ON a.workspace_id = d.workspace_id AND a.agent_id = d.agent_id
     WHERE d.workspace_id = $1 AND d.agent_id = $2 AND d.seq = $3 AND d.expires_at > $4
), bumped AS (
    UPDATE mailbox_heads h SET next_seq = h.next_seq + 1 FROM old
     WHERE h.workspace_id = old.workspace_id AND h.agent_id = old.agent_id
    RETURNING h.next_seq - 1 AS seq
)
INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no, channel_id,
                        node_id, mode, reason, created_at, expires_at)
SELECT old.workspace_id, old.agent_id, bumped.seq, $5, old.source_kind, old.source_id, old.redrive_no + 1,
       old.channel_id, old.located, old.mode, old.reason, $4, old.expires_at
  FROM old, bumped
RETURNING seq";

/// Returns the retry mode of an agent; `None` if a failure is recorded only. If a new delivery may follow, locks the
/// mailbox head now, because heads are locked before cursors.
pub(crate) async fn lock_retry_mode(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
) -> StoreResult<Option<RetryMode>> {
    let doing = "reading the kind of an agent's node";
    // An implicit direct node has no row before its first token is minted; it is a ws node.
    let place: Option<(NodeKind, Option<i32>)> = sqlx::query_as(formatcp!(
        "SELECT coalesce(n.kind, '{WS}'), CASE WHEN jsonb_typeof(n.delivery::jsonb #> '{{retry,schedule}}') = 'array'
                             THEN jsonb_array_length(n.delivery::jsonb #> '{{retry,schedule}}') END
           FROM agents a
           LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
          WHERE a.workspace_id = $1 AND a.agent_id = $2 AND a.deleted_at IS NULL"
    ))
    .bind(scope.workspace_id())
    .bind(agent)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    match place {
        Some((NodeKind::Poll | NodeKind::HttpPush, pauses)) => Ok(Some(RetryMode::InPlace { pauses })),
        Some((NodeKind::Ws, _)) => {
            sqlx::query("SELECT FROM mailbox_heads WHERE workspace_id = $1 AND agent_id = $2 FOR UPDATE")
                .bind(scope.workspace_id())
                .bind(agent)
                .execute(&mut **tx)
                .await
                .map_err(StoreError::from_sqlx("locking the head of a mailbox"))?;
            Ok(Some(RetryMode::Redrive))
        }
        None => Ok(None),
    }
}

/// Delivery that failed.
#[derive(Clone, Copy)]
pub(crate) struct FailedDelivery {
    pub(crate) scope: WorkspaceScope,
    pub(crate) delivery: DeliveryId,
    /// Position in the mailbox.
    pub(crate) seq: Seq,
}

/// Decides the consequence of a failure, and writes the new delivery of a redrive. The caller holds the cursor row. A
/// new delivery keeps the expiry of the failed one.
pub(crate) async fn decide_failure_outcome(
    tx: &mut Transaction,
    failed: FailedDelivery,
    retry: &RetryMode,
    claim_count: Option<i32>,
    at: DateTime<Utc>,
) -> StoreResult<FailureOutcome> {
    let FailedDelivery { scope, delivery, seq } = failed;
    match retry {
        RetryMode::InPlace { pauses } => schedule_retry(tx, failed, claim_count, *pauses, at).await,
        RetryMode::Redrive if delivery.redrive_no >= MAX_REDRIVES => {
            Ok(FailureOutcome::DeadLetter(DeadLetterReason::AttemptsExhausted))
        }
        RetryMode::Redrive => {
            let fresh: Option<Seq> = sqlx::query_scalar(REDRIVE)
                .bind(scope.workspace_id())
                .bind(delivery.agent)
                .bind(seq)
                .bind(at)
                .bind(day_of(at))
                .fetch_optional(&mut **tx)
                .await
                .map_err(StoreError::from_sqlx("redriving a failed delivery"))?;
            Ok(fresh.map_or(FailureOutcome::None, |seq| FailureOutcome::Redriven { seq }))
        }
    }
}

/// Schedules the retry of a delivery, or gives it up when the node's schedule is exhausted.
async fn schedule_retry(
    tx: &mut Transaction,
    FailedDelivery { scope, delivery, seq }: FailedDelivery,
    claim_count: Option<i32>,
    pauses: Option<i32>,
    at: DateTime<Utc>,
) -> StoreResult<FailureOutcome> {
    // Failures are counted by attempts or claims: the settlement row of the last deferral was deleted when the delivery
    // was handed over again.
    let attempts: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM delivery_attempts
          WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3 AND error IS NULL",
    )
    .bind(scope.workspace_id())
    .bind(delivery.agent)
    .bind(seq)
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("counting the attempts of a delivery"))?;
    // An attempt is recorded after its answer, so a failure that is reported during the first attempt finds none.
    let failed = i64::from(claim_count.unwrap_or(0)).max(attempts).max(1);
    if pauses.is_some_and(|pauses| failed > i64::from(pauses)) {
        return Ok(FailureOutcome::DeadLetter(DeadLetterReason::AttemptsExhausted));
    }
    let pause = consumer_backoff(u32::try_from(failed).unwrap_or(u32::MAX));
    let pause = TimeDelta::from_std(pause).unwrap_or_else(|_| TimeDelta::minutes(10));
    Ok(FailureOutcome::Retry { at: at + pause, retry_no: i16::try_from(failed).unwrap_or(i16::MAX) })
}

/// Completes a dead letter with the names that its sender's notice needs.
pub(crate) async fn read_dead_letter(
    tx: &mut Transaction,
    FailedDelivery { scope, delivery, seq }: FailedDelivery,
    reason: DeadLetterReason,
    error: Option<&str>,
    place: Option<MessageLocation>,
) -> StoreResult<DeadLetteredDelivery> {
    // The source may be an invocation; then the search finds no message.
    let (agent_name, sender) = sqlx::query_as(
        "SELECT (SELECT name FROM agents WHERE workspace_id = $1 AND agent_id = $2) AS name,
                (SELECT agent_id FROM messages
                  WHERE workspace_id = $1 AND message_id = $3 AND created_on = $4) AS sender",
    )
    .bind(scope.workspace_id())
    .bind(delivery.agent)
    .bind(delivery.source)
    .bind(day_of_id(delivery.source.get()))
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("reading the agents of a dead letter"))?;
    Ok(DeadLetteredDelivery {
        scope,
        delivery_id: delivery,
        seq,
        reason,
        error: error.map(str::to_owned),
        agent_name,
        sender,
        place,
    })
}
