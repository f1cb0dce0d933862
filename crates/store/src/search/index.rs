//! The search index, filled asynchronously by the worker, so that it never delays a send.
//!
//! Message ids are assigned before the commit, so a message may become visible after one with a larger id. Each
//! workspace has two marks. Up to `reached_id` the index has the messages that were visible in the first pass. Up
//! to `settled_id` it is complete, because a second pass reads the same range two minutes later. A search reads
//! messages above `settled_id` that are not indexed from the messages table.

use std::collections::HashSet;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{MessageId, WorkspaceId, WorkspaceScope, snowflake};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    connections::DatabaseSession,
    maintenance::loop_state::{LoopState, lock_state, save_state},
    messages::days::day_of_id,
};

const SEARCH_INDEX: &str = "search_index";
const WANTED_SEARCH_INDEX: &str = "wanted_search_index";
/// Position before the first workspace.
const BEFORE_ALL: WorkspaceId = WorkspaceId::new(-1);
/// Workspaces that one step reads.
const WORKSPACES_PER_STEP: i64 = 2000;
/// Time after which no older message can become visible. A batch transaction takes 15 s at most, and a batch with
/// an unknown commit outcome is submitted again for 30 s.
pub(crate) const VISIBLE_WITHIN: TimeDelta = TimeDelta::seconds(120);

/// Workspaces whose messages a step indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexedWorkspaces {
    All,
    /// Those that have searched or read statistics within the last weeks.
    Wanted,
}

impl IndexedWorkspaces {
    /// Returns the name of the loop state with the position of the steps.
    const fn state(self) -> &'static str {
        match self {
            Self::All => SEARCH_INDEX,
            Self::Wanted => WANTED_SEARCH_INDEX,
        }
    }

    /// Returns the statement that reads the next workspaces.
    const fn turn(self) -> &'static str {
        match self {
            Self::All => TURN,
            Self::Wanted => WANTED_TURN,
        }
    }
}

/// Progress of one indexing step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexStep {
    pub added: u64,
    /// True if messages are left.
    pub more: bool,
}

/// The two marks of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
struct IndexProgress {
    workspace_id: WorkspaceId,
    // Marks are numbers: they are computed from times and need not be ids of messages.
    reached_id: i64,
    settled_id: i64,
}

/// A message and whether it is indexed.
type IndexedMessage = (WorkspaceId, MessageId, bool);

/// Primary keys of messages, as columns.
#[derive(Default)]
struct MessageKeys {
    workspaces: Vec<WorkspaceId>,
    messages: Vec<MessageId>,
    days: Vec<NaiveDate>,
}

impl MessageKeys {
    fn push(&mut self, workspace: WorkspaceId, message: MessageId) {
        self.workspaces.push(workspace);
        self.messages.push(message);
        self.days.push(day_of_id(message.get()));
    }

    fn push_unindexed(&mut self, messages: &[IndexedMessage]) {
        for (workspace, message, _) in messages.iter().filter(|(_, _, indexed)| !indexed) {
            self.push(*workspace, *message);
        }
    }
}

// The next workspaces in id order, starting after the last one of the previous step.
const TURN: &str = "
SELECT w.workspace_id, coalesce(p.reached_id, 0) AS reached_id, coalesce(p.settled_id, 0) AS settled_id
  FROM workspaces w LEFT JOIN search_progress p USING (workspace_id)
 WHERE w.workspace_id > $1 AND w.deleted_at IS NULL
 ORDER BY w.workspace_id LIMIT $2";

// The same of the workspaces whose index is wanted. The first condition on the time is that of the index.
const WANTED_TURN: &str = "
SELECT w.workspace_id, p.reached_id, p.settled_id
  FROM search_progress p JOIN workspaces w USING (workspace_id)
 WHERE p.wanted_until > '-infinity' AND p.wanted_until > relay_now()
   AND p.workspace_id > $1 AND w.deleted_at IS NULL
 ORDER BY p.workspace_id LIMIT $2";

// Messages between two marks of each workspace, in order, at most $4 in all, and whether each is indexed. The
// bounds on `created_on` follow from the ids and keep the scan to the partitions that can have such ids.
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

/// Adds messages that are not indexed yet and returns their keys.
///
/// `OFFSET 0` forces a lookup by key for each message and its channel: with outdated statistics the planner takes
/// new tables for small ones and would join by full scans. A block has 8192 messages.
// Concurrent calls may count the same positions: a block then has a few messages more, which does no harm.
const INDEX: &str = formatcp!(
    "
INSERT INTO message_search (workspace_id, message_id, created_on, channel_id, direct, block, document)
SELECT workspace_id, message_id, created_on, channel_id, direct, block,
       relay_search_document(workspace_id, block, channel_id, agent_name, text)
  FROM (SELECT m.workspace_id, m.message_id, m.created_on, m.channel_id, m.agent_name, m.text, c.type <> {CHANNEL} AS direct,
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
RETURNING workspace_id, message_id"
);

/// Adds new messages to the statistics per workspace, day and author, and to the number of indexed messages. Rows
/// are upserted in key order, so that concurrent calls do not deadlock.
const COUNT: &str = formatcp!(
    "
WITH counted AS (
    INSERT INTO message_stats AS s
           (workspace_id, created_on, agent_id, channel_messages, direct_messages, attachment_count,
            mention_count, latency_count, latency_sum_ms, latency_max_ms, cost_usd, prompt_tokens,
            completion_tokens, total_tokens, last_message_at)
    SELECT workspace_id, created_on, agent_id, count(*) FILTER (WHERE NOT direct), count(*) FILTER (WHERE direct),
           sum(attachment_count), sum(mention_count), count(latency), coalesce(sum(latency), 0), max(latency),
           coalesce(sum(cost), 0), coalesce(sum(prompt), 0), coalesce(sum(completion), 0),
           coalesce(sum(coalesce(total, coalesce(prompt, 0) + coalesce(completion, 0))), 0), max(created_at)
      FROM (SELECT m.workspace_id, m.created_on, m.agent_id, m.created_at, c.type <> {CHANNEL} AS direct,
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
             CROSS JOIN LATERAL (SELECT m.metadata::text <> '{{}}' AS noted) AS has) AS added
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
ON CONFLICT (workspace_id) DO UPDATE SET indexed_count = p.indexed_count + excluded.indexed_count"
);

impl Store {
    /// Runs one step of both passes, each over at most `page` messages: messages above `reached_id`, then messages
    /// below it that are old enough that no earlier message can still become visible.
    pub async fn index_messages(
        &self,
        which: IndexedWorkspaces,
        now: DateTime<Utc>,
        page: i64,
    ) -> StoreResult<IndexStep> {
        let doing = "indexing messages";
        if which == IndexedWorkspaces::Wanted && !self.wants_any_index().await? {
            return Ok(IndexStep::default());
        }
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<i64>(&mut tx, which.state()).await? {
            LoopState::Busy => return Ok(IndexStep::default()),
            LoopState::Locked(workspace) => workspace.map_or(BEFORE_ALL, WorkspaceId::new),
        };
        let mut turn = read_turn(&mut tx, which, from).await?;
        if turn.is_empty() && from != BEFORE_ALL {
            // The end of the workspaces: start again with the first one.
            turn = read_turn(&mut tx, which, BEFORE_ALL).await?;
        }
        // To write only the marks that have moved: most workspaces of a turn are idle.
        let before = turn.clone();
        let old_enough = ((now - VISIBLE_WITHIN).timestamp_millis() - snowflake::EPOCH_MS).max(0) << 22;
        let mut keys = MessageKeys::default();
        let first = run_first_pass(&mut tx, &mut turn, &mut keys, old_enough, page).await?;
        let second_is_full = run_second_pass(&mut tx, &mut turn, &mut keys, old_enough, page).await?;
        let added = add_to_index(&mut tx, &keys).await?;
        let moved: Vec<IndexProgress> = turn.into_iter().filter(|progress| !before.contains(progress)).collect();
        move_marks(&mut tx, &moved).await?;
        save_state(&mut tx, which.state(), &first.next.get()).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(IndexStep { added, more: first.is_full || second_is_full })
    }
}

impl Store {
    /// Indexes at most `page` new messages of one workspace now, for statistics that must include them. It takes no
    /// loop lock and moves no mark: the insert ignores messages that the loop indexes at the same time.
    pub async fn index_newest(&self, scope: WorkspaceScope, page: i64) -> StoreResult<u64> {
        let doing = "indexing the newest messages";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let workspace = scope.workspace_id();
        let settled_id: Option<i64> =
            sqlx::query_scalar("SELECT settled_id FROM search_progress WHERE workspace_id = $1")
                .bind(workspace)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        // A workspace without progress has no index yet.
        let settled_id = settled_id.unwrap_or(0);
        let missing: Vec<MessageId> = sqlx::query_scalar(
            "SELECT message_id FROM messages
              WHERE workspace_id = $1 AND message_id > $2 AND created_on >= $3
                AND message_id NOT IN (SELECT message_id FROM message_search
                                        WHERE workspace_id = $1 AND message_id > $2 AND created_on >= $3)
              ORDER BY message_id LIMIT $4",
        )
        .bind(workspace)
        .bind(settled_id)
        .bind(day_of_id(settled_id))
        .bind(page)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut keys = MessageKeys::default();
        for message in missing {
            keys.push(workspace, message);
        }
        let added = add_to_index(&mut tx, &keys).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(added)
    }
}

struct FirstPass {
    /// Workspace after which the next step starts.
    next: WorkspaceId,
    is_full: bool,
}

/// Finds the messages above `reached_id` and moves that mark. A full page cuts `turn` to the workspaces that it has
/// reached.
async fn run_first_pass(
    tx: &mut DatabaseSession,
    turn: &mut Vec<IndexProgress>,
    keys: &mut MessageKeys,
    old_enough: i64,
    page: i64,
) -> StoreResult<FirstPass> {
    let mut next = match turn.last() {
        Some(last) if turn.len() as i64 == WORKSPACES_PER_STEP => last.workspace_id,
        _ => BEFORE_ALL,
    };
    let fresh = messages_between(tx, turn, |p| (p.reached_id, i64::MAX), page).await?;
    let is_full = fresh.len() as i64 == page;
    if is_full {
        // The next step starts after the last workspace of this page, so that a busy workspace does not starve the
        // others.
        next = fresh.last().map_or(BEFORE_ALL, |(workspace, ..)| *workspace);
        turn.retain(|progress| progress.workspace_id <= next);
    }
    keys.push_unindexed(&fresh);
    for (workspace, message, _) in &fresh {
        if let Ok(at) = turn.binary_search_by_key(workspace, |progress| progress.workspace_id) {
            turn[at].reached_id = message.get();
        }
    }
    if !is_full {
        let busy: HashSet<WorkspaceId> = fresh.iter().map(|(workspace, ..)| *workspace).collect();
        advance_idle(turn, &busy, old_enough);
    }
    Ok(FirstPass { next, is_full })
}

/// Finds the messages between the marks that were not visible in the first pass and moves `settled_id`. Returns true
/// if messages are left.
async fn run_second_pass(
    tx: &mut DatabaseSession,
    turn: &mut [IndexProgress],
    keys: &mut MessageKeys,
    old_enough: i64,
    page: i64,
) -> StoreResult<bool> {
    let upto = |p: &IndexProgress| (p.settled_id, p.reached_id.min(old_enough).max(p.settled_id));
    let waiting: Vec<IndexProgress> = turn.iter().filter(|p| upto(p).1 > p.settled_id).copied().collect();
    let settling = messages_between(tx, &waiting, upto, page).await?;
    let cut_off = (settling.len() as i64 == page).then(|| settling.last().map(|(workspace, ..)| *workspace)).flatten();
    for progress in turn.iter_mut() {
        if cut_off.is_none_or(|last| progress.workspace_id < last) {
            progress.settled_id = upto(progress).1;
        }
    }
    keys.push_unindexed(&settling);
    // The last workspace of a full page is settled as far as its messages were read.
    if let Some(workspace) = cut_off
        && let Ok(at) = turn.binary_search_by_key(&workspace, |progress| progress.workspace_id)
        && let Some((_, message, _)) = settling.last()
    {
        turn[at].settled_id = message.get();
    }
    Ok(cut_off.is_some())
}

/// Moves the marks of workspaces without messages for a day, so that their next step does not scan the partitions of
/// all days since. Safe because nothing below `old_enough` can still become visible.
fn advance_idle(turn: &mut [IndexProgress], busy: &HashSet<WorkspaceId>, old_enough: i64) {
    const DAY: i64 = (24 * 3600 * 1000) << 22;
    for progress in turn {
        let settled = progress.settled_id == progress.reached_id;
        if settled && progress.reached_id < old_enough - DAY && !busy.contains(&progress.workspace_id) {
            (progress.reached_id, progress.settled_id) = (old_enough, old_enough);
        }
    }
}

async fn read_turn(
    tx: &mut DatabaseSession,
    which: IndexedWorkspaces,
    from: WorkspaceId,
) -> StoreResult<Vec<IndexProgress>> {
    sqlx::query_as(which.turn())
        .bind(from)
        .bind(WORKSPACES_PER_STEP)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading workspaces to index"))
}

/// Reads the messages between two marks of each workspace, and whether they are indexed.
async fn messages_between(
    tx: &mut DatabaseSession,
    turn: &[IndexProgress],
    marks: impl Fn(&IndexProgress) -> (i64, i64),
    page: i64,
) -> StoreResult<Vec<IndexedMessage>> {
    if turn.is_empty() {
        return Ok(Vec::new());
    }
    let workspaces: Vec<WorkspaceId> = turn.iter().map(|progress| progress.workspace_id).collect();
    let (above, upto): (Vec<i64>, Vec<i64>) = turn.iter().map(marks).unzip();
    sqlx::query_as(BETWEEN)
        .bind(workspaces)
        .bind(above)
        .bind(upto)
        .bind(page)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading messages to index"))
}

/// Indexes the messages that are not indexed yet, and counts them in the statistics.
async fn add_to_index(tx: &mut DatabaseSession, keys: &MessageKeys) -> StoreResult<u64> {
    let doing = "indexing messages";
    if keys.messages.is_empty() {
        return Ok(0);
    }
    let rows: Vec<(WorkspaceId, MessageId)> = sqlx::query_as(INDEX)
        .bind(&keys.workspaces)
        .bind(&keys.messages)
        .bind(&keys.days)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    // Only rows that this insert added are counted, so that a message counts once however often it is read.
    let mut added = MessageKeys::default();
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

/// Indexes a message whose text was changed in this transaction. The row is inserted first: otherwise the worker
/// could insert it afterwards with the old text from its snapshot.
pub(crate) async fn reindex_message(
    tx: &mut DatabaseSession,
    workspace: WorkspaceId,
    message: MessageId,
) -> StoreResult<()> {
    let mut keys = MessageKeys::default();
    keys.push(workspace, message);
    add_to_index(tx, &keys).await?;
    sqlx::query(
        "UPDATE message_search s
            SET document = relay_search_document(m.workspace_id, s.block, m.channel_id, m.agent_name, m.text)
           FROM messages m
          WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3
            AND s.workspace_id = $1 AND s.message_id = $2 AND s.created_on = $3",
    )
    .bind(workspace)
    .bind(message)
    .bind(day_of_id(message.get()))
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("indexing a changed message"))?;
    Ok(())
}

async fn move_marks(tx: &mut DatabaseSession, moved: &[IndexProgress]) -> StoreResult<()> {
    if moved.is_empty() {
        return Ok(());
    }
    // `greatest`: marks never move back.
    let workspaces: Vec<WorkspaceId> = moved.iter().map(|p| p.workspace_id).collect();
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
