//! The search index: filled behind the messages, never in their way.
//!
//! Ids are taken before a message is committed, so one may become visible after a larger one. Each workspace
//! has two marks: up to `reached_id` the index has what was visible when it got there, up to `settled_id` it
//! has everything, because everything up to there is looked at again two minutes later. A search reads what
//! lies above `settled_id` and is not in the index from the messages themselves.

use std::collections::HashSet;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use relay_domain::{WorkspaceScope, snowflake};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    loop_state::{Remembered, recall, remember},
    messages_read::day_of,
};

const SEARCH_INDEX: &str = "search_index";
/// Workspaces that one step looks at.
const WORKSPACES: i64 = 2000;
/// A transaction takes seconds at most, and one whose COMMIT got no answer is submitted again for 30 s.
pub(crate) const VISIBLE_WITHIN: TimeDelta = TimeDelta::seconds(120);

/// What one step over the search index did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Indexed {
    /// Messages added.
    pub added: u64,
    /// Whether messages were left over.
    pub more: bool,
}

/// How far the index reaches in a workspace.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
struct Progress {
    workspace_id: i64,
    reached_id: i64,
    settled_id: i64,
}

/// Messages as their keys, in columns.
#[derive(Default)]
struct Keys {
    workspaces: Vec<i64>,
    messages: Vec<i64>,
    days: Vec<NaiveDate>,
}

impl Keys {
    fn push(&mut self, workspace: i64, message: i64) {
        self.workspaces.push(workspace);
        self.messages.push(message);
        self.days.push(day_of(message));
    }
}

// Workspaces in turn, beginning behind the one that the last step ended with.
const TURN: &str = "
SELECT w.workspace_id, coalesce(p.reached_id, 0) AS reached_id, coalesce(p.settled_id, 0) AS settled_id
  FROM workspaces w LEFT JOIN search_progress p USING (workspace_id)
 WHERE w.workspace_id > $1 AND w.deleted_at IS NULL
 ORDER BY w.workspace_id LIMIT $2";

// What lies between two marks of each workspace, in order, at most $4 in all; and whether it is indexed.
const BETWEEN: &str = "
SELECT m.workspace_id, m.message_id, s.message_id IS NOT NULL
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, above, upto)
 CROSS JOIN LATERAL (
       SELECT workspace_id, message_id, created_on FROM messages
        WHERE workspace_id = k.workspace_id AND message_id > k.above AND message_id <= k.upto
          AND created_on >= DATE '2025-01-01' + ((k.above >> 22) / 86400000)::integer
          AND created_on <= current_date + 1
        ORDER BY message_id LIMIT $4) AS m
  LEFT JOIN message_search s
         ON s.workspace_id = m.workspace_id AND s.message_id = m.message_id AND s.created_on = m.created_on
 ORDER BY m.workspace_id, m.message_id LIMIT $4";

/// Adds messages that are not in the index yet, and says which they were.
///
/// Each message and its channel are looked up by key (`OFFSET 0` keeps the look-ups apart): a planner that takes young
/// tables for small ones would join by reading them whole.
const INDEX: &str = "
INSERT INTO message_search (workspace_id, message_id, created_on, channel_id, direct, block, document)
SELECT workspace_id, message_id, created_on, channel_id, direct, block,
       relay_search_document(workspace_id, block, channel_id, agent_name, text)
  FROM (SELECT m.workspace_id, m.message_id, m.created_on, m.channel_id, m.agent_name, m.text, c.type <> 0 AS direct,
               (coalesce(p.indexed_count, 0)
                + row_number() OVER (PARTITION BY m.workspace_id ORDER BY m.message_id) - 1) / 8192 AS block
          FROM unnest($1::bigint[], $2::bigint[], $3::date[]) AS k (workspace_id, message_id, created_on)
         CROSS JOIN LATERAL (
               SELECT * FROM messages
                WHERE workspace_id = k.workspace_id AND message_id = k.message_id AND created_on = k.created_on
               OFFSET 0) AS m
         CROSS JOIN LATERAL (
               SELECT type FROM channels
                WHERE workspace_id = m.workspace_id AND channel_id = m.channel_id OFFSET 0) AS c
          LEFT JOIN search_progress p ON p.workspace_id = k.workspace_id) AS fresh
 ORDER BY workspace_id, message_id
ON CONFLICT DO NOTHING
RETURNING workspace_id, message_id";

/// Counts messages that were added.
const COUNT: &str = "
WITH counted AS (
    INSERT INTO message_stats AS s
           (workspace_id, created_on, agent_id, channel_messages, direct_messages, attachment_count,
            mention_count, latency_count, latency_sum_ms, latency_max_ms, cost_usd, prompt_tokens,
            completion_tokens, total_tokens, last_message_at)
    SELECT workspace_id, created_on, agent_id, count(*) FILTER (WHERE NOT direct), count(*) FILTER (WHERE direct),
           sum(attachment_count), sum(mention_count), count(latency), coalesce(sum(latency), 0), max(latency),
           coalesce(sum(cost), 0), coalesce(sum(prompt), 0), coalesce(sum(completion), 0),
           coalesce(sum(coalesce(total, coalesce(prompt, 0) + coalesce(completion, 0))), 0), max(created_at)
      FROM (SELECT m.workspace_id, m.created_on, m.agent_id, m.created_at, c.type <> 0 AS direct,
                   json_array_length(m.attachments) AS attachment_count,
                   cardinality(m.mentions) AS mention_count,
                   CASE WHEN noted THEN relay_metric(m.metadata, 'latency_ms', 'latency_ms') END AS latency,
                   CASE WHEN noted THEN relay_metric(m.metadata, 'cost_usd', 'total_cost_usd') END AS cost,
                   CASE WHEN noted THEN relay_metric(m.metadata, 'prompt_tokens', 'input_tokens') END AS prompt,
                   CASE WHEN noted THEN relay_metric(m.metadata, 'completion_tokens', 'output_tokens') END AS completion,
                   CASE WHEN noted THEN relay_metric(m.metadata, 'total_tokens', 'total_tokens') END AS total
              FROM unnest($1::bigint[], $2::bigint[], $3::date[]) AS k (workspace_id, message_id, created_on)
             CROSS JOIN LATERAL (
                   SELECT * FROM messages
                    WHERE workspace_id = k.workspace_id AND message_id = k.message_id AND created_on = k.created_on
                   OFFSET 0) AS m
             CROSS JOIN LATERAL (
                   SELECT type FROM channels
                    WHERE workspace_id = m.workspace_id AND channel_id = m.channel_id OFFSET 0) AS c
             CROSS JOIN LATERAL (SELECT m.metadata::text <> '{}' AS noted) AS has) AS added
     GROUP BY workspace_id, created_on, agent_id ORDER BY workspace_id, created_on, agent_id
    ON CONFLICT (workspace_id, created_on, agent_id) DO UPDATE
       SET channel_messages = s.channel_messages + excluded.channel_messages,
           direct_messages = s.direct_messages + excluded.direct_messages,
           attachment_count = s.attachment_count + excluded.attachment_count,
           mention_count = s.mention_count + excluded.mention_count,
           latency_count = s.latency_count + excluded.latency_count,
           latency_sum_ms = s.latency_sum_ms + excluded.latency_sum_ms,
           latency_max_ms = greatest(s.latency_max_ms, excluded.latency_max_ms),
           cost_usd = s.cost_usd + excluded.cost_usd,
           prompt_tokens = s.prompt_tokens + excluded.prompt_tokens,
           completion_tokens = s.completion_tokens + excluded.completion_tokens,
           total_tokens = s.total_tokens + excluded.total_tokens,
           last_message_at = greatest(s.last_message_at, excluded.last_message_at)
)
INSERT INTO search_progress AS p (workspace_id, indexed_count)
SELECT workspace_id, count(*) FROM unnest($1::bigint[]) AS k (workspace_id)
 GROUP BY workspace_id ORDER BY workspace_id
ON CONFLICT (workspace_id) DO UPDATE SET indexed_count = p.indexed_count + excluded.indexed_count";

impl Store {
    /// One step over the messages that are not in the search index yet, at most `page` of them; and over
    /// those that have become old enough that nothing before them can still become visible.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn index_messages(&self, now: DateTime<Utc>, page: i64) -> StoreResult<Indexed> {
        let doing = "indexing messages";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match recall::<i64>(&mut tx, SEARCH_INDEX).await? {
            Remembered::Busy => return Ok(Indexed::default()),
            Remembered::Ours(workspace) => workspace.unwrap_or(-1),
        };
        let mut turn = take_turn(&mut tx, from).await?;
        if turn.is_empty() && from != -1 {
            // All had theirs: the first one's again.
            turn = take_turn(&mut tx, -1).await?;
        }
        let mut next = match turn.last() {
            Some(last) if turn.len() as i64 == WORKSPACES => last.workspace_id,
            _ => -1,
        };
        let before = turn.clone();
        let mut keys = Keys::default();

        // What is new.
        let fresh = between(&mut tx, &turn, |p| (p.reached_id, i64::MAX), page).await?;
        let full = fresh.len() as i64 == page;
        if full {
            // The others' turn is next, and this one's again when they had theirs.
            next = fresh.last().map_or(-1, |(workspace, ..)| *workspace);
            turn.retain(|progress| progress.workspace_id <= next);
        }
        let busy: HashSet<i64> = fresh.iter().map(|(workspace, ..)| *workspace).collect();
        for (workspace, message, indexed) in fresh {
            if !indexed {
                keys.push(workspace, message);
            }
            if let Ok(at) = turn.binary_search_by_key(&workspace, |progress| progress.workspace_id) {
                turn[at].reached_id = message;
            }
        }

        let old_enough = ((now - VISIBLE_WITHIN).timestamp_millis() - snowflake::EPOCH_MS).max(0) << 22;
        if !full {
            rest(&mut turn, &busy, old_enough);
        }

        // What was looked at once, and has had its time.
        let upto = |p: &Progress| (p.settled_id, p.reached_id.min(old_enough).max(p.settled_id));
        let waiting: Vec<Progress> = turn.iter().filter(|p| upto(p).1 > p.settled_id).copied().collect();
        let settling = between(&mut tx, &waiting, upto, page).await?;
        let cut_off = (settling.len() as i64 == page).then(|| settling.last().map_or(-1, |(w, ..)| *w));
        for progress in &mut turn {
            if cut_off.is_none_or(|last| progress.workspace_id < last) {
                progress.settled_id = upto(progress).1;
            }
        }
        for (workspace, message, indexed) in settling {
            if !indexed {
                keys.push(workspace, message);
            }
            if cut_off == Some(workspace)
                && let Ok(at) = turn.binary_search_by_key(&workspace, |progress| progress.workspace_id)
            {
                turn[at].settled_id = message;
            }
        }

        let added = index(&mut tx, &keys).await?;
        let moved: Vec<Progress> = turn
            .into_iter()
            .filter(|p| {
                !before.iter().any(|old| {
                    (old.workspace_id, old.reached_id, old.settled_id) == (p.workspace_id, p.reached_id, p.settled_id)
                })
            })
            .collect();
        move_marks(&mut tx, &moved).await?;
        remember(&mut tx, SEARCH_INDEX, &next).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Indexed { added, more: full || cut_off.is_some() })
    }
}

impl Store {
    /// Puts what is new in one workspace into the index now, at most `page` messages: for an answer that must
    /// have counted them.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn index_tail(&self, scope: WorkspaceScope, page: i64) -> StoreResult<u64> {
        let doing = "indexing the newest messages";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let workspace = scope.workspace_id().get();
        let settled_id: Option<i64> =
            sqlx::query_scalar("SELECT settled_id FROM search_progress WHERE workspace_id = $1")
                .bind(workspace)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        let missing: Vec<i64> = sqlx::query_scalar(
            "SELECT message_id FROM messages
              WHERE workspace_id = $1 AND message_id > $2 AND created_on >= $3
                AND message_id NOT IN (SELECT message_id FROM message_search
                                        WHERE workspace_id = $1 AND message_id > $2 AND created_on >= $3)
              ORDER BY message_id LIMIT $4",
        )
        .bind(workspace)
        .bind(settled_id.unwrap_or(0))
        .bind(day_of(settled_id.unwrap_or(0)))
        .bind(page)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut keys = Keys::default();
        for message in missing {
            keys.push(workspace, message);
        }
        let added = index(&mut tx, &keys).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(added)
    }
}

/// Moves the marks of workspaces that were silent for a day, so that their next turn does not look into the
/// partitions of all the days before: nothing below `old_enough` can still become visible.
fn rest(turn: &mut [Progress], busy: &HashSet<i64>, old_enough: i64) {
    const DAY: i64 = (24 * 3600 * 1000) << 22;
    for progress in turn {
        let settled = progress.settled_id == progress.reached_id;
        if settled && progress.reached_id < old_enough - DAY && !busy.contains(&progress.workspace_id) {
            (progress.reached_id, progress.settled_id) = (old_enough, old_enough);
        }
    }
}

async fn take_turn(tx: &mut PgConnection, from: i64) -> StoreResult<Vec<Progress>> {
    sqlx::query_as(TURN)
        .bind(from)
        .bind(WORKSPACES)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("taking turns at indexing"))
}

/// The messages between two marks of each workspace, and whether they are indexed.
async fn between(
    tx: &mut PgConnection,
    turn: &[Progress],
    marks: impl Fn(&Progress) -> (i64, i64),
    page: i64,
) -> StoreResult<Vec<(i64, i64, bool)>> {
    if turn.is_empty() {
        return Ok(Vec::new());
    }
    let workspaces: Vec<i64> = turn.iter().map(|progress| progress.workspace_id).collect();
    let (above, upto): (Vec<i64>, Vec<i64>) = turn.iter().map(marks).unzip();
    sqlx::query_as(BETWEEN)
        .bind(workspaces)
        .bind(above)
        .bind(upto)
        .bind(page)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("looking for messages to index"))
}

/// Adds these messages to the index unless they are in it, and counts those that were not.
async fn index(tx: &mut PgConnection, keys: &Keys) -> StoreResult<u64> {
    let doing = "indexing messages";
    if keys.messages.is_empty() {
        return Ok(0);
    }
    let rows: Vec<(i64, i64)> = sqlx::query_as(INDEX)
        .bind(&keys.workspaces)
        .bind(&keys.messages)
        .bind(&keys.days)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let mut added = Keys::default();
    for (workspace, message) in &rows {
        added.push(*workspace, *message);
    }
    if !rows.is_empty() {
        sqlx::query(COUNT)
            .bind(&added.workspaces)
            .bind(&added.messages)
            .bind(&added.days)
            .execute(tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
    }
    Ok(u64::try_from(rows.len()).unwrap_or(0))
}

/// Puts a message that is about to change its text into the index, so that the worker does not put the
/// text there that it has read before; then gives it the new words.
pub(crate) async fn replace(tx: &mut PgConnection, workspace: i64, message: i64) -> StoreResult<()> {
    let mut keys = Keys::default();
    keys.push(workspace, message);
    index(tx, &keys).await?;
    sqlx::query(
        "UPDATE message_search s
            SET document = relay_search_document(m.workspace_id, s.block, m.channel_id, m.agent_name, m.text)
           FROM messages m
          WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3
            AND s.workspace_id = $1 AND s.message_id = $2 AND s.created_on = $3",
    )
    .bind(workspace)
    .bind(message)
    .bind(day_of(message))
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("indexing a changed message"))?;
    Ok(())
}

async fn move_marks(tx: &mut PgConnection, moved: &[Progress]) -> StoreResult<()> {
    if moved.is_empty() {
        return Ok(());
    }
    let workspaces: Vec<i64> = moved.iter().map(|p| p.workspace_id).collect();
    let reached: Vec<i64> = moved.iter().map(|p| p.reached_id).collect();
    let settled: Vec<i64> = moved.iter().map(|p| p.settled_id).collect();
    sqlx::query(
        "INSERT INTO search_progress AS p (workspace_id, reached_id, settled_id)
         SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, reached, settled)
          ORDER BY workspace_id
         ON CONFLICT (workspace_id)
         DO UPDATE SET reached_id = greatest(p.reached_id, excluded.reached_id),
                       settled_id = greatest(p.settled_id, excluded.settled_id)",
    )
    .bind(workspaces)
    .bind(reached)
    .bind(settled)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("moving the marks of the search index"))?;
    Ok(())
}
