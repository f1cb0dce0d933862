//! Searching messages: the index, and what is not in it yet.

use std::collections::HashSet;

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceScope};
use sqlx::Row as _;

use crate::{Store, StoreError, StoreResult, messages_read::day_of};

/// The newest matches that are ranked; older ones are not looked at.
pub const RANKED: usize = 1000;
/// Messages above the index's settled mark that a search looks at, newest first.
const UNSETTLED: i64 = 50_000;
/// Of these the ones whose text is read, because they are not in the index.
const UNINDEXED: i64 = 5000;
/// Blocks of the index, counted from the newest, that a search looks through before all others. With 8192
/// messages in each, a frequent word is found often enough there.
const NEWEST_BLOCKS: [i64; 2] = [1, 8];

/// Whose messages a search may find.
#[derive(Debug, Clone)]
pub enum Reader {
    /// Everything in the workspace.
    Workspace,
    /// All channels, and the conversations that the agent takes part in.
    Agent(AgentId),
}

impl Reader {
    const fn agent(&self) -> Option<i64> {
        match self {
            Self::Workspace => None,
            Self::Agent(agent) => Some(agent.get()),
        }
    }
}

/// What is looked for.
#[derive(Debug, Clone)]
pub struct SearchQuery<'a> {
    /// Words, phrases in quotes, `or`, and `-` for what must be absent.
    pub text: &'a str,
    /// Only this channel.
    pub channel: Option<ChannelId>,
    /// Only this author, by name.
    pub from: Option<&'a str>,
    /// Only older messages than this.
    pub before: Option<MessageId>,
    /// Only newer messages than this.
    pub after: Option<MessageId>,
}

/// A message that was found.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct FoundMessage {
    /// The message.
    pub message_id: i64,
    /// Its channel.
    pub channel_id: i64,
    /// The channel's name.
    pub channel_name: String,
    /// What clients call its conversation.
    pub conversation_id: Option<String>,
    /// Its author.
    pub agent_id: i64,
    /// The author's name when it was written.
    pub agent_name: String,
    /// The text.
    pub text: String,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
    /// The root of its thread.
    pub thread_id: Option<i64>,
    /// How well it matches: more is better.
    #[sqlx(skip)]
    pub score: f32,
}

/// Where the index of a workspace ends.
struct Edge {
    settled_id: i64,
    newest_block: i64,
}

// The tail: what no mark covers and the index does not have. In key order, newest first.
const TAIL: &str = "
SELECT t.message_id, ts_rank(to_tsvector('simple', left(t.text, 32768)), websearch_to_tsquery('simple', $2))
  FROM (SELECT n.message_id, n.text
          FROM (SELECT * FROM messages
                 WHERE workspace_id = $1 AND message_id > $3 AND message_id > $4 AND message_id < $5
                   AND created_on >= $6 AND created_on <= $7
                 ORDER BY message_id DESC LIMIT $8) AS n
         WHERE n.message_id NOT IN (SELECT s.message_id FROM message_search s
                                     WHERE s.workspace_id = $1 AND s.message_id > $3 AND s.message_id > $4
                                       AND s.message_id < $5 AND s.created_on >= $6 AND s.created_on <= $7)
           AND ($9::bigint IS NULL OR n.channel_id = $9)
           AND ($10::text IS NULL OR n.agent_name = $10)
           AND ($11::bigint IS NULL
                OR n.channel_id IN (SELECT channel_id FROM channels WHERE workspace_id = $1 AND type = 0)
                OR n.channel_id IN (SELECT channel_id FROM channel_members
                                     WHERE workspace_id = $1 AND agent_id = $11))
         ORDER BY n.message_id DESC LIMIT $12) AS t
 WHERE to_tsvector('simple', left(t.text, 32768)) @@ websearch_to_tsquery('simple', $2)
 ORDER BY t.message_id DESC LIMIT $13";

// The index. The tenant is one of the words asked for: `+ 0` keeps the primary key, which could only be read
// whole, out of it.
const BLOCKS: &str = "
SELECT s.message_id, ts_rank(s.document, websearch_to_tsquery('simple', $2))
  FROM message_search s
 WHERE s.document @@ (websearch_to_tsquery('simple', $2) && $3::tsquery)
   AND s.workspace_id + 0 = $1 AND s.message_id + 0 > $4 AND s.message_id + 0 < $5
   AND s.created_on >= $6 AND s.created_on <= $7 AND s.block < $8
   AND ($9::bigint IS NULL OR NOT s.direct
        OR s.channel_id IN (SELECT channel_id FROM channel_members WHERE workspace_id = $1 AND agent_id = $9))
 ORDER BY s.message_id DESC LIMIT $10";

impl Store {
    /// The best matches of a search, best first, newer ones first among equals; at most `limit`.
    ///
    /// Of more than [`RANKED`] matches the newest are ranked. Texts count up to their 32 768th character.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn search(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        limit: usize,
    ) -> StoreResult<Vec<FoundMessage>> {
        let edge = self.search_edge(scope, query.before).await?;
        let Some(edge) = edge.filter(|_| !query.text.trim().is_empty()) else { return Ok(Vec::new()) };
        // Words that say nothing (`-`, `""`, `!!`) find nothing.
        let nothing: bool = sqlx::query_scalar("SELECT numnode(websearch_to_tsquery('simple', $1)) = 0")
            .bind(query.text)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a search"))?;
        if nothing {
            return Ok(Vec::new());
        }
        let mut found = self.search_tail(scope, reader, query, &edge).await?;
        let mut below = i64::from(i32::MAX);
        let mut first = edge.newest_block + 1;
        for blocks in NEWEST_BLOCKS.into_iter().map(Some).chain([None]) {
            if found.len() >= RANKED || first <= 0 {
                break;
            }
            let from = blocks.map_or(0, |blocks| (first - blocks).max(0));
            // All blocks at once need no list of them.
            let listed = (from > 0).then_some(from..first);
            found.extend(self.search_blocks(scope, reader, query, listed, below).await?);
            (below, first) = (from, from);
        }
        // What the indexer took up between two of these statements is found by both.
        let mut seen = HashSet::new();
        found.retain(|(id, _)| seen.insert(*id));
        found.truncate(RANKED);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        found.truncate(limit);
        self.found_messages(scope, &found).await
    }

    async fn search_edge(&self, scope: WorkspaceScope, before: Option<MessageId>) -> StoreResult<Option<Edge>> {
        // Blocks follow the ids, but for messages that became visible late: those are one block off.
        let row = sqlx::query(
            "SELECT coalesce(p.settled_id, 0),
                    least((coalesce(p.indexed_count, 0) - 1) / 8192,
                          1 + (SELECT s.block FROM message_search s
                                WHERE s.workspace_id = $1 AND s.message_id < $2 AND s.created_on <= $3
                                ORDER BY s.message_id DESC LIMIT 1))
               FROM workspaces w LEFT JOIN search_progress p USING (workspace_id) WHERE w.workspace_id = $1",
        )
        .bind(scope.workspace_id().get())
        .bind(before.map(MessageId::get))
        .bind(before.map(|before| day_of(before.get()).min(last_day())))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading how far the search index reaches"))?;
        Ok(row.map(|row| Edge { settled_id: row.get(0), newest_block: row.get(1) }))
    }

    async fn search_tail(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        edge: &Edge,
    ) -> StoreResult<Vec<(i64, f32)>> {
        let after = query.after.map_or(-1, MessageId::get);
        let (first_day, last_day) = days(after.max(edge.settled_id), query.before);
        sqlx::query_as(TAIL)
            .bind(scope.workspace_id().get())
            .bind(query.text)
            .bind(edge.settled_id)
            .bind(after)
            .bind(query.before.map_or(i64::MAX, MessageId::get))
            .bind(first_day)
            .bind(last_day)
            .bind(UNSETTLED)
            .bind(query.channel.map(ChannelId::get))
            .bind(query.from)
            .bind(reader.agent())
            .bind(UNINDEXED)
            .bind(RANKED as i64)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("searching messages that are not indexed yet"))
    }

    /// Searches the blocks listed, or all, below a block.
    async fn search_blocks(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        listed: Option<std::ops::Range<i64>>,
        below: i64,
    ) -> StoreResult<Vec<(i64, f32)>> {
        let after = query.after.map_or(-1, MessageId::get);
        let (first_day, last_day) = days(after, query.before);
        sqlx::query_as(BLOCKS)
            .bind(scope.workspace_id().get())
            .bind(query.text)
            .bind(marks(scope, query, listed))
            .bind(after)
            .bind(query.before.map_or(i64::MAX, MessageId::get))
            .bind(first_day)
            .bind(last_day)
            .bind(i32::try_from(below).unwrap_or(i32::MAX))
            .bind(reader.agent())
            .bind(RANKED as i64)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("searching messages"))
    }

    /// What is shown of the messages found, in their order.
    async fn found_messages(&self, scope: WorkspaceScope, found: &[(i64, f32)]) -> StoreResult<Vec<FoundMessage>> {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<i64> = found.iter().map(|(id, _)| *id).collect();
        let days: Vec<NaiveDate> = ids.iter().map(|id| day_of(*id)).collect();
        let mut rows: Vec<FoundMessage> = sqlx::query_as(
            "SELECT m.message_id, m.channel_id, c.name AS channel_name, c.conversation_id, m.agent_id, m.agent_name,
                    m.text, m.created_at, m.thread_id
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
               JOIN messages m ON m.workspace_id = $1 AND m.message_id = k.message_id AND m.created_on = k.created_on
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id",
        )
        .bind(scope.workspace_id().get())
        .bind(&ids)
        .bind(days)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the messages found"))?;
        rows.sort_by_key(|row| ids.iter().position(|id| *id == row.message_id));
        for row in &mut rows {
            row.score = found.iter().find(|(id, _)| *id == row.message_id).map_or(0.0, |(_, score)| *score);
        }
        Ok(rows)
    }
}

/// The days that messages between the two can be of.
fn days(after: i64, before: Option<MessageId>) -> (NaiveDate, NaiveDate) {
    (day_of(after.max(0)), before.map_or(NaiveDate::MAX, |before| day_of(before.get())).min(last_day()))
}

/// The last day that Postgres' dates and ours both have.
fn last_day() -> NaiveDate {
    NaiveDate::from_ymd_opt(9999, 12, 31).unwrap_or_default()
}

/// The words that no text contains, for one tenant and what narrows the search in it.
fn marks(scope: WorkspaceScope, query: &SearchQuery<'_>, blocks: Option<std::ops::Range<i64>>) -> String {
    let workspace = scope.workspace_id().get();
    let place = match blocks {
        Some(blocks) => blocks.map(|block| format!("' w{workspace}.{block}'")).collect::<Vec<_>>().join(" | "),
        None => format!("' w{workspace}'"),
    };
    let mut marks = format!("({place})");
    if let Some(channel) = query.channel {
        marks.push_str(&format!(" & ' c{channel}'"));
    }
    if let Some(name) = query.from {
        marks.push_str(&format!(" & ' n{}'", name.replace('\\', "\\\\").replace('\'', "''")));
    }
    marks
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[test]
    fn marks_cannot_be_broken_out_of() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let query = SearchQuery {
            text: "x",
            channel: Some(ChannelId::new(3)),
            from: Some(r"o'brien\' | ' w8"),
            before: None,
            after: None,
        };
        assert_eq!(marks(scope, &query, Some(4..6)), r"(' w7.4' | ' w7.5') & ' c3' & ' no''brien\\'' | '' w8'");
        assert_eq!(marks(scope, &SearchQuery { channel: None, from: None, ..query }, None), "(' w7')");
    }
}
