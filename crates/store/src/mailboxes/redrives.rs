//! Redrives of dead letters: each becomes a new delivery of the same message, with the next seq of its mailbox.
//!
//! A dead letter is redriven once; the new delivery may become a dead letter and be redriven in turn, three times in
//! all. The heads of the mailboxes are locked first and in order, as for a send. All other rows are read after that, so
//! that of two concurrent redrives of one dead letter the second sees the first. A redrive by filter visits its dead
//! letters in passes: the next pass repeats those that full mailboxes refused.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, RedriveId, WorkspaceId, WorkspaceScope,
    ids::as_number,
    mailboxes::{dead_letter::Redrive, stream::Seq},
};
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, types::Json};

pub use super::redrive_batch::RedriveOutcome;
use super::redrive_batch::redrive;
use crate::{
    Store, StoreError, StoreResult, codes::DEAD_LETTERED, events::RecordedEvents,
    mailboxes::dead_letters::DeadLetterFilter,
};

/// Dead letters of one transaction at most. Bounds the time for which mailbox heads stay locked.
pub const REDRIVE_BATCH: i64 = 250;
/// Pause before the next pass over full mailboxes.
const PASS_DELAY: Duration = Duration::from_secs(30);
/// Age of a redrive from which a pass that redrives nothing is the last one.
const MAX_FULL_DURATION: Duration = Duration::from_secs(3600);

/// Result of one step of a redrive.
#[derive(Debug)]
pub struct RedriveStep {
    pub scope: WorkspaceScope,
    /// Mailboxes with new deliveries, each once.
    pub mailboxes: Vec<AgentId>,
    pub redriven: u64,
    /// `None` in a workspace without observers.
    pub recorded: Option<RecordedEvents>,
    /// Delay behind the time for which the step was scheduled.
    pub late_seconds: f64,
}

/// Redrive that is to begin.
#[derive(Debug)]
pub struct NewRedrive<'a> {
    pub id: RedriveId,
    pub filter: &'a DeadLetterFilter,
    /// Dead letters per second.
    pub rate: i32,
    /// Number of dead letters that the filter matches now.
    pub matched: i64,
}

/// Counts of the current pass of a redrive.
#[derive(Debug, Default, FromRow)]
struct PassCounts {
    #[sqlx(rename = "pass_redriven")]
    redriven: i64,
    #[sqlx(rename = "pass_refused")]
    refused: i64,
    /// Dead letters that a full mailbox refused.
    #[sqlx(rename = "pass_full")]
    full: i64,
}

impl PassCounts {
    fn count(&mut self, outcomes: &[RedriveOutcome]) {
        for outcome in outcomes {
            match outcome {
                RedriveOutcome::Redriven { now: true, .. } => self.redriven += 1,
                RedriveOutcome::Redriven { .. } => {}
                RedriveOutcome::MailboxFull => self.full += 1,
                RedriveOutcome::Exhausted
                | RedriveOutcome::AgentDeleted
                | RedriveOutcome::MessageDropped
                | RedriveOutcome::NotFound => self.refused += 1,
            }
        }
    }
}

/// Condition: the next step of a redrive is due.
pub(crate) const IS_DUE: &str = "EXISTS (SELECT FROM redrives WHERE next_at <= relay_now())";

/// Redrive whose next step is due.
#[derive(FromRow)]
struct DueRedrive {
    workspace_id: WorkspaceId,
    redrive_id: RedriveId,
    filter: Json<StoredFilter>,
    from_at: DateTime<Utc>,
    until_at: DateTime<Utc>,
    /// Dead letters per second.
    rate: i32,
    position_at: Option<DateTime<Utc>>,
    position_agent: Option<AgentId>,
    position_seq: Option<Seq>,
    #[sqlx(flatten)]
    pass: PassCounts,
    late_seconds: f64,
    is_old: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct StoredFilter {
    #[serde(default, with = "as_number::option")]
    agent_id: Option<AgentId>,
    node_id: Option<String>,
    reason: Option<String>,
}

const NEXT_LETTERS: &str = formatcp!(
    "
SELECT e.at, e.agent_id, e.seq
  FROM delivery_exceptions e
 WHERE e.workspace_id = $1 AND e.state = {DEAD_LETTERED} AND e.purged_at IS NULL AND e.redriven_seq IS NULL
   AND ($2::bigint IS NULL OR e.agent_id = $2)
   AND ($4::text IS NULL OR coalesce(e.reason, 'ttl_expired') = $4)
   AND e.at >= $5 AND e.at < $6
   AND ($7::timestamptz IS NULL OR (e.at, e.agent_id, e.seq) > ($7, $8, $9))
   AND EXISTS (SELECT FROM deliveries d
                WHERE d.workspace_id = e.workspace_id AND d.agent_id = e.agent_id AND d.seq = e.seq
                  AND ($3::text IS NULL OR d.node_id = $3))
 ORDER BY e.at, e.agent_id, e.seq LIMIT $10"
);

// $9: the pass has ended and another follows; $10: it was the last one.
const RECORD_STEP: &str = "
UPDATE redrives
   SET position_at = CASE WHEN NOT $9 THEN coalesce($3, position_at) END,
       position_agent = CASE WHEN NOT $9 THEN coalesce($4, position_agent) END,
       position_seq = CASE WHEN NOT $9 THEN coalesce($5, position_seq) END,
       redriven = redriven + $6, refused = greatest(refused, $7),
       pass_redriven = $11, pass_refused = $12, pass_full = $13,
       -- A delay of up to one second is caught up, a longer one is not: no burst exceeds the rate.
       next_at = CASE WHEN $10 THEN NULL
                      WHEN $9 THEN relay_now() + make_interval(secs => $14)
                      ELSE greatest(next_at, relay_now() - interval '1 second')
                           + make_interval(secs => $8::float8 / rate) END,
       finished_at = CASE WHEN $10 THEN $15::timestamptz END
 WHERE workspace_id = $1 AND redrive_id = $2";

impl Store {
    /// Redrives one dead letter. A repeated call returns the delivery that the first one created.
    pub async fn redrive_dead_letter(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seq: Seq,
        at: DateTime<Utc>,
    ) -> StoreResult<(RedriveOutcome, Option<RecordedEvents>)> {
        let doing = "redriving a dead letter";
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let redriven = redrive(&mut tx, scope, &[agent], &[seq], (at, epoch)).await;
        let (outcomes, recorded) = self.note_epoch(epoch, redriven)?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        // One seq has at most one outcome. Without one there was no dead letter to redrive.
        Ok((outcomes.into_iter().next().unwrap_or(RedriveOutcome::NotFound), recorded))
    }

    /// Begins a redrive by filter, which workers carry out. Dead letters from `until` on are not part of it.
    pub async fn begin_redrive(
        &self,
        scope: WorkspaceScope,
        new: &NewRedrive<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<Redrive> {
        let NewRedrive { id, filter, rate, matched } = *new;
        let kept = StoredFilter { agent_id: filter.agent, node_id: filter.node.clone(), reason: filter.reason.clone() };
        sqlx::query_as(
            "INSERT INTO redrives (workspace_id, redrive_id, filter, from_at, until_at, rate, matched, created_at, next_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, relay_now())
             RETURNING redrive_id, rate, matched, redriven, refused, created_at, finished_at",
        )
        .bind(scope.workspace_id())
        .bind(id)
        .bind(Json(kept))
        .bind(filter.from.unwrap_or(DateTime::UNIX_EPOCH))
        // Not beyond now, so that the redrive ends: its own deliveries may become dead letters while it is carried out.
        .bind(filter.until.map_or(at, |until| until.min(at)))
        .bind(rate)
        .bind(matched)
        .bind(at)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("beginning a redrive"))
    }

    /// Reads the progress of a redrive.
    pub async fn redrive(&self, scope: WorkspaceScope, id: RedriveId) -> StoreResult<Option<Redrive>> {
        sqlx::query_as(
            "SELECT redrive_id, rate, matched, redriven, refused, created_at, finished_at
               FROM redrives WHERE workspace_id = $1 AND redrive_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a redrive"))
    }

    /// Performs one step of the redrive that has been due for longest: its next dead letters, as many as its rate
    /// allows in `step`. After a pass with full mailboxes another follows, unless the pass redrove nothing and the
    /// redrive is an hour old. Returns `None` if no redrive is due, or other workers hold those that are (SKIP LOCKED).
    pub async fn redrive_step(&self, step: TimeDelta, at: DateTime<Utc>) -> StoreResult<Option<RedriveStep>> {
        let doing = "stepping a redrive";
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let due: Option<DueRedrive> = sqlx::query_as(
            "SELECT workspace_id, redrive_id, filter, from_at, until_at, rate, position_at, position_agent,
                    position_seq, pass_redriven, pass_refused, pass_full,
                    extract(epoch FROM relay_now() - next_at)::float8 AS late_seconds,
                    relay_now() - created_at > make_interval(secs => $1) AS is_old
               FROM redrives WHERE next_at <= relay_now() ORDER BY next_at LIMIT 1 FOR UPDATE SKIP LOCKED",
        )
        .bind(MAX_FULL_DURATION.as_secs_f64())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(due) = due else { return Ok(None) };
        let DueRedrive { filter: Json(filter), mut pass, .. } = due;
        let scope = WorkspaceScope::from_engine_row(due.workspace_id);
        // At least one, so that a low rate advances, too: the next step is due later then.
        let most = (i64::from(due.rate) * step.num_milliseconds() / 1000).clamp(1, REDRIVE_BATCH);
        let letters: Vec<(DateTime<Utc>, AgentId, Seq)> = sqlx::query_as(NEXT_LETTERS)
            .bind(scope.workspace_id())
            .bind(filter.agent_id)
            .bind(&filter.node_id)
            .bind(&filter.reason)
            .bind(due.from_at)
            .bind(due.until_at)
            .bind(due.position_at)
            .bind(due.position_agent)
            .bind(due.position_seq)
            .bind(most)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let (agents, seqs): (Vec<AgentId>, Vec<Seq>) = letters.iter().map(|(_, agent, seq)| (*agent, *seq)).unzip();
        // In the transaction of the position, so that a crash neither repeats nor skips a dead letter.
        let redriven = redrive(&mut tx, scope, &agents, &seqs, (at, epoch)).await;
        let (outcomes, recorded) = self.note_epoch(epoch, redriven)?;
        let is_redriven = |outcome: &&RedriveOutcome| matches!(outcome, RedriveOutcome::Redriven { now: true, .. });
        let redriven = outcomes.iter().filter(is_redriven).count();
        pass.count(&outcomes);
        let is_over = i64::try_from(letters.len()).is_ok_and(|found| found < most);
        let is_given_up = pass.redriven == 0 && due.is_old;
        let follows_another = is_over && pass.full > 0 && !is_given_up;
        let is_finished = is_over && !follows_another;
        // Every pass refuses the same dead letters again, so the counts of passes are not added up.
        let refused = pass.refused + if is_finished { pass.full } else { 0 };
        if follows_another {
            pass = PassCounts::default();
        }
        let last = letters.last();
        sqlx::query(RECORD_STEP)
            .bind(scope.workspace_id())
            .bind(due.redrive_id)
            .bind(last.map(|(at, _, _)| *at))
            .bind(last.map(|(_, agent, _)| *agent))
            .bind(last.map(|(_, _, seq)| *seq))
            // Always fits: at most the dead letters of one step.
            .bind(i64::try_from(redriven).unwrap_or(0))
            .bind(refused)
            .bind(f64::from(i32::try_from(letters.len()).unwrap_or(i32::MAX)))
            .bind(follows_another)
            .bind(is_finished)
            .bind(pass.redriven)
            .bind(pass.refused)
            .bind(pass.full)
            .bind(PASS_DELAY.as_secs_f64())
            .bind(at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let mut mailboxes: Vec<AgentId> =
            agents.iter().zip(&outcomes).filter(|(_, outcome)| is_redriven(outcome)).map(|(agent, _)| *agent).collect();
        mailboxes.sort_unstable();
        mailboxes.dedup();
        Ok(Some(RedriveStep {
            scope,
            mailboxes,
            redriven: redriven as u64,
            recorded,
            late_seconds: due.late_seconds.max(0.0),
        }))
    }

    /// Removes up to `limit` finished redrives that began longer ago than `age`.
    pub async fn prune_redrives(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM redrives r
              USING (SELECT workspace_id, redrive_id FROM redrives
                      WHERE created_at < relay_now() - make_interval(secs => $1) AND finished_at IS NOT NULL
                      ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE r.workspace_id = old.workspace_id AND r.redrive_id = old.redrive_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning redrives"))?;
        Ok(done.rows_affected())
    }
}
