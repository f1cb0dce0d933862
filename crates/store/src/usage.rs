//! What workspaces used, by the minute: rolled up behind what happens, and read.
//!
//! A round goes over all workspaces, in steps, once a minute is over. It counts the rows of each minute that is not final
//! yet and puts the numbers in place of those of the round before, so a repetition changes nothing. A minute becomes
//! final two minutes after its end, when nothing of it can still become visible. Acks leave no rows to count: what the
//! floors of a workspace's mailboxes rose by since the round before counts for the minute that is just over.

use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use relay_domain::{WorkspaceScope, snowflake};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    loop_state::{Remembered, recall, remember},
    search_index::VISIBLE_WITHIN,
};

const USAGE: &str = "usage";
/// Minutes that one round counts when workers were away.
const AT_ONCE: TimeDelta = TimeDelta::minutes(60);
/// Rows that are older may have been dropped.
const COUNTABLE: TimeDelta = TimeDelta::days(6);

/// What one step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RolledUp {
    /// Workspaces that were looked at.
    pub workspaces: u64,
    /// Whether the round, or the next one, goes on at once.
    pub more: bool,
    /// How long ago the newest minute that was counted has ended.
    pub behind: Option<TimeDelta>,
}

/// Into what minutes are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// Each by itself.
    Minute,
    /// By hours, UTC.
    Hour,
    /// By days, UTC.
    Day,
}

impl Granularity {
    /// The word in requests, answers and SQL.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    /// How long one is.
    #[must_use]
    pub const fn length(self) -> TimeDelta {
        match self {
            Self::Minute => TimeDelta::minutes(1),
            Self::Hour => TimeDelta::hours(1),
            Self::Day => TimeDelta::days(1),
        }
    }
}

/// What a workspace used in a while. Whiles without any use have no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow, Serialize)]
pub struct Usage {
    /// When the while began.
    pub at: DateTime<Utc>,
    /// Messages accepted.
    pub messages: i64,
    /// Deliveries of them, one for each recipient.
    pub deliveries: i64,
    /// Deliveries acknowledged over a socket or by push.
    pub acked: i64,
    /// Deliveries settled by any means, as far as no older one waits.
    pub settled: i64,
    /// Deliveries that were given up.
    pub dead_letters: i64,
    /// Actions invoked.
    pub invocations: i64,
    /// Tries to push deliveries over HTTP.
    pub push_attempts: i64,
}

/// Where the rounds are.
#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    /// When rolling up began: what older workspaces did before is not counted.
    began: DateTime<Utc>,
    /// Minutes before are final.
    from: DateTime<Utc>,
    /// Minutes from here on were not counted yet.
    until: DateTime<Utc>,
    /// The last workspace of the round under way; `None` between rounds.
    after: Option<i64>,
    /// The recovery that the floors were added up after.
    recovered_at: Option<DateTime<Utc>>,
    /// What the round does with floors.
    floors: Floors,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Floors {
    /// A later round catches up with now.
    Skip,
    /// They are noted and not counted: rolling up begins, or recovery has moved them.
    Note,
    Count,
}

impl Progress {
    fn beginning(minute: DateTime<Utc>) -> Self {
        Self {
            began: minute,
            from: minute,
            until: minute,
            after: Some(i64::MIN),
            recovered_at: None,
            floors: Floors::Note,
        }
    }

    /// Whether all minutes that are over are counted by now, or by the round under way.
    fn is_newest(&self, this_minute: DateTime<Utc>) -> bool {
        self.until >= this_minute
    }
}

const TURN: &str = "
SELECT workspace_id FROM workspaces WHERE workspace_id > $1 AND deleted_at IS NULL ORDER BY workspace_id LIMIT $2";

/// Counts the rows of the minutes in [$2, $3), whose ids are in [$4, $5). Each branch is a range of an index that begins
/// with the workspace, in at most a few partitions. $6 is the epoch of the ids, in ms.
///
/// Redeliveries of a message count as little as its first delivery counts again.
const COUNT: &str = "
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
                  AND source_kind = 0 AND redrive_no = 0 AND created_on BETWEEN $2::date - 1 AND $3::date + 1
                GROUP BY 1
                UNION ALL
               SELECT floor(extract(epoch FROM at) / 60)::bigint, 0, 0, count(*), 0, 0
                 FROM delivery_exceptions
                WHERE workspace_id = w.workspace_id AND state = 4 AND at >= $2 AND at < $3
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
                         excluded.push_attempts)";

/// Adds what the floors rose by to the minute $2. Floors that were never noted count from nothing in a workspace that is
/// younger than the rolling up ($3), and not at all in an older one. While they are only noted ($4) nothing is added, and
/// those of younger workspaces are left for the next round, which adds all.
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
    /// One step of a round over up to `page` workspaces; nothing while no minute has ended since the last round, or
    /// another worker is at it.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn roll_up_usage(&self, now: DateTime<Utc>, page: i64) -> StoreResult<RolledUp> {
        let doing = "rolling up usage";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let this_minute = minute_of(now);
        let mut progress = match recall::<Progress>(&mut tx, USAGE).await? {
            Remembered::Busy => return Ok(RolledUp::default()),
            Remembered::Ours(progress) => progress.unwrap_or_else(|| Progress::beginning(this_minute)),
        };
        if progress.after.is_none() {
            if progress.is_newest(this_minute) {
                let behind = Some(now - progress.until);
                return Ok(RolledUp { behind, ..RolledUp::default() });
            }
            begin_round(&mut tx, &mut progress, this_minute).await?;
        }
        let turn: Vec<i64> = sqlx::query_scalar(TURN)
            .bind(progress.after)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        count(&mut tx, &turn, &progress).await?;
        if progress.floors != Floors::Skip {
            add_floors(&mut tx, &turn, &progress).await?;
        }
        progress.after = turn.last().copied().filter(|_| turn.len() as i64 == page);
        if progress.after.is_none() {
            let is_final = minute_of(now - VISIBLE_WITHIN).min(progress.until);
            progress.from = progress.from.max(is_final);
        }
        remember(&mut tx, USAGE, &progress).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let more = progress.after.is_some() || !progress.is_newest(this_minute);
        Ok(RolledUp { workspaces: turn.len() as u64, more, behind: Some(now - progress.until) })
    }

    /// What a workspace used in the minutes that began in [`since`, `until`), oldest first; and up to when that is final.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn usage(
        &self,
        scope: WorkspaceScope,
        since: DateTime<Utc>,
        until: DateTime<Utc>,
        granularity: Granularity,
    ) -> StoreResult<(Vec<Usage>, Option<DateTime<Utc>>)> {
        let doing = "reading usage";
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
        .bind(scope.workspace_id().get())
        .bind(since)
        .bind(until)
        .bind(granularity.as_str())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let is_final: Option<DateTime<Utc>> =
            sqlx::query_scalar("SELECT (value ->> 'from')::timestamptz FROM loop_state WHERE loop = $1")
                .bind(USAGE)
                .fetch_optional(&self.pool)
                .await
                .map_err(StoreError::from_sqlx(doing))?
                .flatten();
        Ok((rows, is_final))
    }
}

async fn begin_round(tx: &mut PgConnection, progress: &mut Progress, this_minute: DateTime<Utc>) -> StoreResult<()> {
    let recovered_at: Option<DateTime<Utc>> = sqlx::query_scalar("SELECT recovered_at FROM recovery_state")
        .fetch_one(tx)
        .await
        .map_err(StoreError::from_sqlx("asking for the last recovery"))?;
    progress.from = progress.from.max(this_minute - COUNTABLE);
    progress.until = this_minute.min(progress.from + AT_ONCE);
    progress.after = Some(i64::MIN);
    progress.floors = if !progress.is_newest(this_minute) {
        Floors::Skip
    } else if recovered_at == progress.recovered_at {
        Floors::Count
    } else {
        Floors::Note
    };
    if progress.floors != Floors::Skip {
        progress.recovered_at = recovered_at;
    }
    Ok(())
}

async fn count(tx: &mut PgConnection, turn: &[i64], progress: &Progress) -> StoreResult<()> {
    if turn.is_empty() || progress.from >= progress.until {
        return Ok(());
    }
    let first_id = |at: DateTime<Utc>| (at.timestamp_millis() - snowflake::EPOCH_MS).max(0) << 22;
    sqlx::query(COUNT)
        .bind(turn)
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

async fn add_floors(tx: &mut PgConnection, turn: &[i64], progress: &Progress) -> StoreResult<()> {
    sqlx::query(ADD_FLOORS)
        .bind(turn)
        .bind(progress.until - TimeDelta::minutes(1))
        .bind(progress.began)
        .bind(progress.floors == Floors::Note)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("counting acks"))?;
    Ok(())
}

fn minute_of(at: DateTime<Utc>) -> DateTime<Utc> {
    at.duration_trunc(TimeDelta::minutes(1)).unwrap_or(at)
}
