//! Claims of deliveries by agents on poll nodes.
//!
//! Nothing is sent to a poll node. Its agents claim deliveries for a lease and report on each: settling ends the lease.

use std::time::Duration;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, ClaimId, WorkspaceScope, mailboxes::stream::Seq};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEFERRED, POLL},
    connections::{DatabaseSession, Transaction},
    mailboxes::locked_cursor::lock_cursor,
};

/// Longest TTL of a delivery: older partitions hold no active row and are not read.
const OLDEST_LIVE_DAYS: i32 = 7;

/// Lease on one claimed delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimLease {
    pub seq: Seq,
    /// Claims so far, including this one.
    pub claim_count: i32,
    /// No other claim gets the delivery before this instant.
    pub leased_until: DateTime<Utc>,
}

/// Claim of an agent's deliveries.
#[derive(Debug, Clone, Copy)]
pub struct NewClaim {
    pub agent: AgentId,
    /// Generation of the token that the agent presented.
    pub token_generation: i64,
    pub claim_id: ClaimId,
    /// Maximum number of deliveries.
    pub limit: i64,
    pub lease: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The agent's token has been rotated since it was presented.
    TokenRotated,
    /// The agent's node is not of kind poll.
    NotPolled,
    /// Leased deliveries, in seq order.
    Claimed(Vec<ClaimLease>),
    /// No delivery can be claimed. Holds the instant when the next lease or deferral ends, if there is one.
    Empty { next_at: Option<DateTime<Utc>> },
}

// Skips deliveries that are leased, deferred, settled or expired. The caller holds the cursor row, so that concurrent
// claims of one mailbox cannot select the same rows.
// The token is compared again, in the snapshot that shows the deliveries: one that was written after a rotation is not
// leased to the token before it.
// `sent`: a claimed delivery counts as delivered, as one that was written to a socket does.
const CLAIM: &str = formatcp!(
    "
WITH free AS MATERIALIZED (
    SELECT d.seq
      FROM deliveries d
      LEFT JOIN delivery_exceptions x
             ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
      LEFT JOIN delivery_claims l
             ON l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id AND l.seq = d.seq
     WHERE d.workspace_id = $1 AND d.agent_id = $2 AND d.seq > $3 AND d.created_on >= (relay_now() AT TIME ZONE 'UTC')::date - $4::int AND d.expires_at > relay_now()
       AND (x.state IS NULL OR (x.state = {DEFERRED} AND x.available_at <= relay_now()))
       AND (l.leased_until IS NULL OR l.leased_until <= relay_now())
       AND EXISTS (SELECT FROM agents a
                    WHERE a.workspace_id = $1 AND a.agent_id = $2 AND a.token_generation = $8)
     ORDER BY d.seq LIMIT $5
), leased AS (
    INSERT INTO delivery_claims AS l (workspace_id, agent_id, seq, claim_id, leased_until)
    SELECT $1, $2, seq, $6, relay_now() + make_interval(secs => $7) FROM free
        ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
       SET claim_id = excluded.claim_id, leased_until = excluded.leased_until, claim_count = l.claim_count + 1
 RETURNING l.seq, l.claim_count, l.leased_until
), undeferred AS (
    -- A due deferral ends with the claim: from here on the lease alone says when the delivery is available again.
    DELETE FROM delivery_exceptions x USING free
     WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.seq = free.seq AND x.state = {DEFERRED}
), sent AS (
    UPDATE mailbox_cursors SET sent_seq = greatest(sent_seq, (SELECT max(seq) FROM free))
     WHERE workspace_id = $1 AND agent_id = $2 AND EXISTS (SELECT FROM free)
)
SELECT seq, claim_count, leased_until FROM leased ORDER BY seq"
);

// The lease of a deferred delivery has ended, but its row stays: the deferral alone says when it is available. A time
// in the past would make a waiting claim ask again at once.
const NEXT_AVAILABLE: &str = formatcp!(
    "
SELECT least(
    (SELECT min(x.available_at) FROM delivery_exceptions x
      WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.seq > $3 AND x.state = {DEFERRED}),
    (SELECT min(l.leased_until) FROM delivery_claims l
      WHERE l.workspace_id = $1 AND l.agent_id = $2 AND l.seq > $3
        AND NOT EXISTS (SELECT FROM delivery_exceptions x
                         WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.seq = l.seq)))"
);

impl Store {
    /// Leases available deliveries of an agent, lowest seq first.
    pub async fn claim_deliveries(&self, scope: WorkspaceScope, claim: NewClaim) -> StoreResult<ClaimOutcome> {
        let NewClaim { agent, token_generation, claim_id, limit, lease } = claim;
        let doing = "claiming deliveries";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        match polled_generation(&mut tx, scope, agent).await? {
            None => return Ok(ClaimOutcome::NotPolled),
            Some(generation) if generation != token_generation => return Ok(ClaimOutcome::TokenRotated),
            Some(_) => {}
        }
        // The lock serializes claims, settlements and expiry of this mailbox.
        let floor = lock_cursor(&mut tx, scope, agent).await?.settled_floor;
        let rows: Vec<(Seq, i32, DateTime<Utc>)> = sqlx::query_as(CLAIM)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(floor)
            .bind(OLDEST_LIVE_DAYS)
            .bind(limit)
            .bind(claim_id)
            .bind(lease.as_secs_f64())
            .bind(token_generation)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if rows.is_empty() {
            let next_at: Option<DateTime<Utc>> = sqlx::query_scalar(NEXT_AVAILABLE)
                .bind(scope.workspace_id())
                .bind(agent)
                .bind(floor)
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            return Ok(ClaimOutcome::Empty { next_at });
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let claimed =
            rows.into_iter().map(|(seq, claim_count, leased_until)| ClaimLease { seq, claim_count, leased_until });
        Ok(ClaimOutcome::Claimed(claimed.collect()))
    }

    /// Removes up to `limit` leases that ended at least `age` ago and returns their count.
    pub async fn prune_claims(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM delivery_claims l
              USING (SELECT workspace_id, agent_id, seq FROM delivery_claims
                      WHERE leased_until < relay_now() - make_interval(secs => $1)
                      ORDER BY leased_until LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE l.workspace_id = old.workspace_id AND l.agent_id = old.agent_id AND l.seq = old.seq",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning leases of deliveries"))?;
        Ok(done.rows_affected())
    }
}

/// Returns the generation of an agent's token if the agent is on a poll node.
async fn polled_generation(tx: &mut Transaction, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Option<i64>> {
    sqlx::query_scalar(formatcp!(
        "SELECT a.token_generation FROM agents a
           JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
          WHERE a.workspace_id = $1 AND a.agent_id = $2 AND a.deleted_at IS NULL AND n.kind = '{POLL}'"
    ))
    .bind(scope.workspace_id())
    .bind(agent)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("reading the kind of an agent's node"))
}

/// Ends all leases of an agent: their holder has lost its token.
pub(crate) async fn end_leases(tx: &mut DatabaseSession, scope: WorkspaceScope, agent: AgentId) -> StoreResult<()> {
    // The rows stay, because the next claim continues their count.
    sqlx::query(
        "UPDATE delivery_claims SET leased_until = relay_now()
          WHERE workspace_id = $1 AND agent_id = $2 AND leased_until > relay_now()",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .execute(tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("ending the leases of an agent"))
}

/// Ends the lease of a reported delivery. Returns its claim count, `None` if it was never claimed.
pub(crate) async fn end_lease(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
    seq: Seq,
) -> StoreResult<Option<i32>> {
    sqlx::query_scalar(
        "UPDATE delivery_claims SET leased_until = relay_now()
          WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3 RETURNING claim_count",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(seq)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("ending the lease of a delivery"))
}
