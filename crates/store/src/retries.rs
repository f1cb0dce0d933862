//! What follows when a recipient reports that it could not handle a delivery: it comes back after a pause, a new
//! delivery takes its place, or it is a dead letter.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    dead_letter::{DeadReason, MAX_REDRIVES},
    push::consumer_backoff,
    session::Seq,
};
use sqlx::{PgTransaction, Row as _};

use crate::{StoreError, StoreResult, commit::day_of, delivered::Place, expiry::DeadLettered, messages_read};

/// How an agent gets its deliveries, for one that reports a failure which could pass.
#[derive(Debug)]
pub(crate) enum Retry {
    /// It is pushed to or claims: nobody remembers ids.
    InPlace {
        /// How many pauses its node's schedule has, if it has one.
        pauses: Option<i32>,
    },
    /// Its node has a socket, and its broker remembers what it has seen.
    Anew,
}

/// What follows a failure.
#[derive(Debug)]
pub(crate) enum Sequel {
    /// Nothing: it is recorded.
    None,
    /// It comes back.
    Back {
        /// When.
        at: DateTime<Utc>,
        /// How often it has failed.
        retry_no: i16,
    },
    /// A new delivery has taken its place.
    Redriven {
        /// Its place in the mailbox.
        seq: Seq,
    },
    /// It is given up.
    Dead(DeadReason),
}

// One without a row that may follow leaves the head alone, so that there is no gap.
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

/// How the agent gets its deliveries; `None` where a failure is recorded only. Where a new delivery may follow, the
/// head of the mailbox is locked, for heads are locked before cursors.
pub(crate) async fn begin(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
) -> StoreResult<Option<Retry>> {
    let doing = "reading what kind of node an agent is on";
    // The node of an agent's own has no row before its first token is minted; then it has a socket.
    let place: Option<(String, Option<i32>)> = sqlx::query_as(
        "SELECT coalesce(n.kind, 'ws'), CASE WHEN jsonb_typeof(n.delivery::jsonb #> '{retry,schedule}') = 'array'
                             THEN jsonb_array_length(n.delivery::jsonb #> '{retry,schedule}') END
           FROM agents a
           LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
          WHERE a.workspace_id = $1 AND a.agent_id = $2 AND a.deleted_at IS NULL",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    match place {
        Some((kind, pauses)) if kind == "poll" || kind == "http_push" => Ok(Some(Retry::InPlace { pauses })),
        Some((kind, _)) if kind == "ws" => {
            sqlx::query("SELECT FROM mailbox_heads WHERE workspace_id = $1 AND agent_id = $2 FOR UPDATE")
                .bind(scope.workspace_id().get())
                .bind(agent.get())
                .execute(&mut **tx)
                .await
                .map_err(StoreError::from_sqlx("locking the head of a mailbox"))?;
            Ok(Some(Retry::Anew))
        }
        _ => Ok(None),
    }
}

/// What follows the failure of a delivery that can be reported as failed. The caller holds the cursor row. A new
/// delivery lives as long as the one before it would have.
pub(crate) async fn sequel(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    seq: Seq,
    retry: &Retry,
    claim_count: Option<i32>,
    at: DateTime<Utc>,
) -> StoreResult<Sequel> {
    match retry {
        Retry::InPlace { pauses } => comes_back(tx, scope, delivery.agent, seq, claim_count, *pauses).await,
        Retry::Anew if delivery.redrive_no >= MAX_REDRIVES => Ok(Sequel::Dead(DeadReason::AttemptsExhausted)),
        Retry::Anew => {
            let fresh: Option<Seq> = sqlx::query_scalar(REDRIVE)
                .bind(scope.workspace_id().get())
                .bind(delivery.agent.get())
                .bind(seq)
                .bind(at)
                .bind(day_of(at))
                .fetch_optional(&mut **tx)
                .await
                .map_err(StoreError::from_sqlx("redriving a delivery that failed"))?;
            Ok(fresh.map_or(Sequel::None, |seq| Sequel::Redriven { seq }))
        }
    }
}

/// When a delivery comes back that its consumer could not handle for now.
async fn comes_back(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
    seq: Seq,
    claim_count: Option<i32>,
    pauses: Option<i32>,
) -> StoreResult<Sequel> {
    // A delivery that was handed over again counts its tries or claims; the row that put it off is gone.
    let tries: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM delivery_attempts
          WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3 AND error IS NULL",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .bind(seq)
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("counting the tries of a delivery"))?;
    let failed = i64::from(claim_count.unwrap_or(0)).max(tries).max(1);
    if pauses.is_some_and(|pauses| failed > i64::from(pauses)) {
        return Ok(Sequel::Dead(DeadReason::AttemptsExhausted));
    }
    let pause = consumer_backoff(u32::try_from(failed).unwrap_or(u32::MAX));
    let pause = TimeDelta::from_std(pause).unwrap_or_else(|_| TimeDelta::minutes(10));
    Ok(Sequel::Back { at: Utc::now() + pause, retry_no: i16::try_from(failed).unwrap_or(i16::MAX) })
}

/// The dead letter that a delivery has become, with what its sender is told.
pub(crate) async fn letter(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    seq: Seq,
    reason: DeadReason,
    error: Option<&str>,
    place: Option<Place>,
) -> StoreResult<DeadLettered> {
    // A number that is no message's finds none.
    let row = sqlx::query(
        "SELECT (SELECT name FROM agents WHERE workspace_id = $1 AND agent_id = $2) AS name,
                (SELECT agent_id FROM messages
                  WHERE workspace_id = $1 AND message_id = $3 AND created_on = $4) AS sender",
    )
    .bind(scope.workspace_id().get())
    .bind(delivery.agent.get())
    .bind(delivery.source)
    .bind(messages_read::day_of(delivery.source))
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("reading whom a dead letter concerns"))?;
    Ok(DeadLettered {
        scope,
        delivery_id: delivery,
        seq,
        reason,
        error: error.map(str::to_owned),
        agent_name: row.get("name"),
        sender: row.get::<Option<i64>, _>("sender").map(AgentId::new),
        place,
    })
}
