//! Usage of workspaces per minute: rolled up by a worker loop, read by the usage route.
//!
//! A round visits all workspaces, in steps, after the end of each minute. It counts the rows of every minute that is
//! not final yet and replaces the numbers of the previous round, so a repeated round changes nothing. A minute becomes
//! final two minutes after its end, when no transaction that wrote to it can still be open. Acks leave no rows to
//! count: the increase of the ack floors of a workspace since the previous round counts for the minute that has just
//! ended.

use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    WorkspaceId, WorkspaceScope,
    ids::as_number,
    snowflake,
    workspaces::usage::{Granularity, UsageBucket},
};
use serde::{Deserialize, Serialize};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    connections::DatabaseSession,
    maintenance::loop_state::{LoopState, lock_state, save_state},
    search::index::VISIBLE_WITHIN,
};

const USAGE: &str = "usage";
/// Range that one round counts at most, after workers were down.
const MAX_ROUND: TimeDelta = TimeDelta::minutes(60);
/// Age of the oldest minute that is counted. Retention may have dropped older rows.
const MAX_AGE: TimeDelta = TimeDelta::days(6);

/// Result of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RollUpStep {
    pub workspaces: u64,
    /// Whether the next step can run at once.
    pub more: bool,
    /// Age of the newest counted minute.
    pub behind: Option<TimeDelta>,
}

/// Position before the first workspace of a round.
const BEFORE_ALL: WorkspaceId = WorkspaceId::new(i64::MIN);

/// Progress of the rounds, stored in `loop_state`.
#[derive(Debug, Serialize, Deserialize)]
struct RollUpProgress {
    /// First run of the loop. Acks of older workspaces before it are not counted.
    began: DateTime<Utc>,
    /// Start of the first minute that is not final.
    from: DateTime<Utc>,
    /// End of the counted minutes.
    until: DateTime<Utc>,
    /// Last workspace of the current round; `None` between rounds.
    #[serde(default, with = "as_number::option")]
    after: Option<WorkspaceId>,
    /// Newest recovery when the floors were last added. A later one has moved the floors.
    recovered_at: Option<DateTime<Utc>>,
    floors: FloorHandling,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum FloorHandling {
    /// A later round will reach the current minute and count them.
    Skip,
    /// They are stored without being counted, on the first round and after a recovery has moved them.
    Note,
    Count,
}

impl RollUpProgress {
    fn beginning(minute: DateTime<Utc>) -> Self {
        Self {
            began: minute,
            from: minute,
            until: minute,
            after: Some(BEFORE_ALL),
            recovered_at: None,
            floors: FloorHandling::Note,
        }
    }

    /// Returns whether all ended minutes are counted by the current round or an earlier one.
    fn is_newest(&self, this_minute: DateTime<Utc>) -> bool {
        self.until >= this_minute
    }
}

const NEXT_WORKSPACES: &str = "
SELECT workspace_id FROM workspaces WHERE workspace_id > $1 AND deleted_at IS NULL ORDER BY workspace_id LIMIT $2";

/// Counts the rows of the minutes in [$2, $3), whose ids are in [$4, $5). Each branch reads a range of an index that
/// begins with the workspace, in at most three days' partitions. $6 is the epoch of the ids, in ms.
///
/// Redriven deliveries are not counted.
const COUNT: &str = formatcp!(
    "
INSERT INTO usage_minutes AS u
       (workspace_id, minute, created_on, messages, deliveries, dead_letters, invocations, push_attempts)
SELECT workspace_id, at, (at AT TIME ZONE 'UTC')::date, sum(messages), sum(deliveries), sum(dead), sum(invoked), sum(pushed)
  FROM (SELECT w.workspace_id, to_timestamp(c.nth * 60) AS at, c.messages, c.deliveries, c.dead, c.invoked, c.pushed
          FROM unnest($1::bigint[]) AS w (workspace_id)
         CROSS JOIN LATERAL (
               SELECT ((message_id >> 22) + $6) / 60000 AS nth,
                      count(*) AS messages, 0 AS deliveries, 0 AS dead, 0 AS invoked, 0 AS pushed
                 FROM messages
                WHERE workspace_id = w.workspace_id AND message_id >= $4 AND message_id < $5
                  AND created_on BETWEEN $2::date - 1 AND $3::date + 1
                GROUP BY 1
                UNION ALL
               SELECT ((source_id >> 22) + $6) / 60000, 0, count(*), 0, 0, 0
                 FROM deliveries
                WHERE workspace_id = w.workspace_id AND source_id >= $4 AND source_id < $5
                  AND source_kind = {MESSAGE_SOURCE} AND redrive_no = 0 AND created_on BETWEEN $2::date - 1 AND $3::date + 1
                GROUP BY 1
                UNION ALL
               SELECT floor(extract(epoch FROM at) / 60)::bigint, 0, 0, count(*), 0, 0
                 FROM delivery_exceptions
                WHERE workspace_id = w.workspace_id AND state = {DEAD_LETTERED} AND at >= $2 AND at < $3
                GROUP BY 1
                UNION ALL
               SELECT ((invocation_id >> 22) + $6) / 60000, 0, 0, 0, count(*), 0
                 FROM invocations
                WHERE workspace_id = w.workspace_id AND invocation_id >= $4 AND invocation_id < $5
                GROUP BY 1
                UNION ALL
               SELECT floor(extract(epoch FROM attempted_at) / 60)::bigint, 0, 0, 0, 0, count(*)
                 FROM delivery_attempts
                WHERE workspace_id = w.workspace_id AND attempted_at >= $2 AND attempted_at < $3
                  AND created_on BETWEEN $2::date - 1 AND $3::date + 1
                GROUP BY 1) AS c) AS counted
 GROUP BY workspace_id, at ORDER BY workspace_id, at
    ON CONFLICT (workspace_id, minute, created_on) DO UPDATE
   SET messages = excluded.messages, deliveries = excluded.deliveries, dead_letters = excluded.dead_letters,
       invocations = excluded.invocations, push_attempts = excluded.push_attempts
 WHERE (u.messages, u.deliveries, u.dead_letters, u.invocations, u.push_attempts)
       IS DISTINCT FROM (excluded.messages, excluded.deliveries, excluded.dead_letters, excluded.invocations,
                         excluded.push_attempts)"
);

/// Adds the increase of the floors to the minute $2. Floors that were never recorded count from 0 in a workspace that
/// was created after the first run of the loop ($3), and not at all in an older one. While they are only noted ($4),
/// nothing is added, and the floors of newer workspaces are left to the next round, which adds all of them.
const ADD_FLOORS: &str = "
WITH now_at AS (
    SELECT w.workspace_id, w.created_at, coalesce(sum(c.ack_floor), 0)::bigint AS acked,
           coalesce(sum(c.settled_floor), 0)::bigint AS settled
      FROM workspaces w LEFT JOIN mailbox_cursors c USING (workspace_id)
     WHERE w.workspace_id = ANY ($1)
     GROUP BY w.workspace_id
), risen AS (
    SELECT n.workspace_id,
           n.acked - CASE WHEN f.workspace_id IS NOT NULL THEN f.acked WHEN n.created_at >= $3 THEN 0 ELSE n.acked END AS acked,
           n.settled - CASE WHEN f.workspace_id IS NOT NULL THEN f.settled WHEN n.created_at >= $3 THEN 0 ELSE n.settled END
               AS settled
      FROM now_at n LEFT JOIN usage_floors f USING (workspace_id)
), noted AS (
    INSERT INTO usage_floors AS f (workspace_id, acked, settled)
    SELECT n.workspace_id, n.acked, n.settled FROM now_at n LEFT JOIN usage_floors f USING (workspace_id)
     WHERE NOT ($4 AND f.workspace_id IS NULL AND n.created_at >= $3)
     ORDER BY n.workspace_id
        ON CONFLICT (workspace_id) DO UPDATE SET acked = excluded.acked, settled = excluded.settled
     WHERE (f.acked, f.settled) IS DISTINCT FROM (excluded.acked, excluded.settled)
)
INSERT INTO usage_minutes AS u (workspace_id, minute, created_on, acked, settled)
SELECT workspace_id, $2, ($2 AT TIME ZONE 'UTC')::date, greatest(acked, 0), greatest(settled, 0)
  FROM risen WHERE NOT $4 AND (acked > 0 OR settled > 0) ORDER BY workspace_id
    ON CONFLICT (workspace_id, minute, created_on) DO UPDATE
   SET acked = u.acked + excluded.acked, settled = u.settled + excluded.settled";

impl Store {
    /// Runs one step of a round, over up to `page` workspaces. Does nothing until a minute has ended since the last
    /// round, or while another worker runs a step.
    pub async fn roll_up_usage(&self, now: DateTime<Utc>, page: i64) -> StoreResult<RollUpStep> {
        let doing = "rolling up usage";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let this_minute = minute_of(now);
        let mut progress = match lock_state::<RollUpProgress>(&mut tx, USAGE).await? {
            LoopState::Busy => return Ok(RollUpStep::default()),
            LoopState::Locked(progress) => progress.unwrap_or_else(|| RollUpProgress::beginning(this_minute)),
        };
        if progress.after.is_none() {
            if progress.is_newest(this_minute) {
                let behind = Some(now - progress.until);
                return Ok(RollUpStep { behind, ..RollUpStep::default() });
            }
            begin_round(&mut tx, &mut progress, this_minute).await?;
        }
        let workspaces: Vec<WorkspaceId> = sqlx::query_scalar(NEXT_WORKSPACES)
            .bind(progress.after)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        count_rows(&mut tx, &workspaces, &progress).await?;
        if progress.floors != FloorHandling::Skip {
            add_floors(&mut tx, &workspaces, &progress).await?;
        }
        // A page that is not full is the last one.
        progress.after = workspaces.last().copied().filter(|_| workspaces.len() as i64 == page);
        if progress.after.is_none() {
            // The deliveries of an open fan-out count in the minute of its message.
            let open: Option<DateTime<Utc>> = sqlx::query_scalar("SELECT min(created_at) FROM fanouts")
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            // Without an open fan-out only visibility holds a minute open.
            let is_final = minute_of(open.unwrap_or(now).min(now - VISIBLE_WITHIN)).min(progress.until);
            // A fan-out that lasts for long must not make final minutes open again.
            progress.from = progress.from.max(is_final);
        }
        save_state(&mut tx, USAGE, &progress).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let more = progress.after.is_some() || !progress.is_newest(this_minute);
        Ok(RollUpStep { workspaces: workspaces.len() as u64, more, behind: Some(now - progress.until) })
    }

    /// Returns the usage of the minutes that begin in [`since`, `until`), oldest bucket first, and the end of the final
    /// minutes.
    pub async fn usage(
        &self,
        scope: WorkspaceScope,
        since: DateTime<Utc>,
        until: DateTime<Utc>,
        granularity: Granularity,
    ) -> StoreResult<(Vec<UsageBucket>, Option<DateTime<Utc>>)> {
        let doing = "reading usage";
        // First: a round that commits between the two reads would declare counts final that were read before it.
        let is_final: Option<DateTime<Utc>> =
            sqlx::query_scalar("SELECT (value ->> 'from')::timestamptz FROM loop_state WHERE loop = $1")
                .bind(USAGE)
                .fetch_optional(&self.pool)
                .await
                .map_err(StoreError::from_sqlx(doing))?
                .flatten();
        let rows = sqlx::query_as(
            "SELECT date_trunc($4, minute, 'UTC') AS at, sum(messages)::bigint AS messages,
                    sum(deliveries)::bigint AS deliveries, sum(acked)::bigint AS acked, sum(settled)::bigint AS settled,
                    sum(dead_letters)::bigint AS dead_letters, sum(invocations)::bigint AS invocations,
                    sum(push_attempts)::bigint AS push_attempts
               FROM usage_minutes
              WHERE workspace_id = $1 AND minute >= $2 AND minute < $3
                AND created_on BETWEEN ($2 AT TIME ZONE 'UTC')::date AND ($3 AT TIME ZONE 'UTC')::date
              GROUP BY 1 ORDER BY 1",
        )
        .bind(scope.workspace_id())
        .bind(since)
        .bind(until)
        .bind(granularity.as_str())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        Ok((rows, is_final))
    }
}

async fn begin_round(
    tx: &mut DatabaseSession,
    progress: &mut RollUpProgress,
    this_minute: DateTime<Utc>,
) -> StoreResult<()> {
    let recovered_at: Option<DateTime<Utc>> = sqlx::query_scalar("SELECT recovered_at FROM recovery_state")
        .fetch_one(tx)
        .await
        .map_err(StoreError::from_sqlx("reading the time of the last recovery"))?;
    progress.from = progress.from.max(this_minute - MAX_AGE);
    progress.until = this_minute.min(progress.from + MAX_ROUND);
    progress.after = Some(BEFORE_ALL);
    progress.floors = if !progress.is_newest(this_minute) {
        FloorHandling::Skip
    } else if recovered_at == progress.recovered_at {
        FloorHandling::Count
    } else {
        FloorHandling::Note
    };
    // Remembered only by a round that stores the floors: one that skips them must not hide the recovery from the next.
    if progress.floors != FloorHandling::Skip {
        progress.recovered_at = recovered_at;
    }
    Ok(())
}

async fn count_rows(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    progress: &RollUpProgress,
) -> StoreResult<()> {
    if workspaces.is_empty() || progress.from >= progress.until {
        return Ok(());
    }
    // No id is older than the epoch of the ids.
    let first_id = |at: DateTime<Utc>| (at.timestamp_millis() - snowflake::EPOCH_MS).max(0) << 22;
    sqlx::query(COUNT)
        .bind(workspaces)
        .bind(progress.from)
        .bind(progress.until)
        .bind(first_id(progress.from))
        .bind(first_id(progress.until))
        .bind(snowflake::EPOCH_MS)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("counting usage"))?;
    Ok(())
}

async fn add_floors(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    progress: &RollUpProgress,
) -> StoreResult<()> {
    sqlx::query(ADD_FLOORS)
        .bind(workspaces)
        .bind(progress.until - TimeDelta::minutes(1))
        .bind(progress.began)
        .bind(progress.floors == FloorHandling::Note)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("counting acks"))?;
    Ok(())
}

fn minute_of(at: DateTime<Utc>) -> DateTime<Utc> {
    // Fails only for instants that are centuries away.
    at.duration_trunc(TimeDelta::minutes(1)).unwrap_or(at)
}
