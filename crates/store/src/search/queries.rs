//! Message search over the index and over the newest messages, which are not indexed yet.
//!
//! Blocks of the index are searched newest first until enough matches are found, so that a frequent word does not
//! read the whole index.

use std::collections::HashSet;

use chrono::NaiveDate;
use const_format::formatcp;
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceScope, search::FoundMessage};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    messages::{
        contents::{days_of, decode_sized},
        days::{MESSAGES_BY_KEY, day_of_id},
    },
};

/// Number of the newest matches that are ranked; older ones are ignored.
pub const MAX_RANKED: usize = 1000;
/// Messages above the settled mark of the index that a search reads, newest first.
const MAX_UNSETTLED: i64 = 50_000;
/// Messages among them whose text is searched, because they are not indexed.
const MAX_UNINDEXED: i64 = 5000;
/// Numbers of blocks, counted from the newest, that a search reads before all others. With 8192 messages in each, a
/// frequent word has enough matches there.
const NEWEST_BLOCKS: [i64; 2] = [1, 8];

/// Visibility of messages in a search.
#[derive(Debug, Clone)]
pub enum Reader {
    /// Everything in the workspace.
    Workspace,
    /// All channels, and the conversations in which the agent takes part.
    Agent(AgentId),
}

impl Reader {
    const fn agent(&self) -> Option<AgentId> {
        match self {
            Self::Workspace => None,
            Self::Agent(agent) => Some(*agent),
        }
    }
}

#[derive(Debug, Clone)]
pub struct SearchQuery<'a> {
    /// Words, quoted phrases, `or`, and `-` before a word that must be absent.
    pub text: &'a str,
    /// Only this channel.
    pub channel: Option<ChannelId>,
    /// Only messages of the author with this name.
    pub from: Option<&'a str>,
    /// Only messages older than this one.
    pub before: Option<MessageId>,
    /// Only messages newer than this one.
    pub after: Option<MessageId>,
}

/// A match and its score.
type Ranked = (MessageId, f32);

/// End of a workspace's index.
#[derive(sqlx::FromRow)]
struct IndexEdge {
    settled_id: i64,
    newest_block: i64,
}

// The tail: messages above the settled mark that are not indexed, newest first. Texts are cut at 32 768 characters,
// as in the index.
const TAIL: &str = formatcp!(
    "
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
                OR n.channel_id IN (SELECT channel_id FROM channels WHERE workspace_id = $1 AND type = {CHANNEL})
                OR n.channel_id IN (SELECT channel_id FROM channel_members
                                     WHERE workspace_id = $1 AND agent_id = $11))
         ORDER BY n.message_id DESC LIMIT $12) AS t
 WHERE to_tsvector('simple', left(t.text, 32768)) @@ websearch_to_tsquery('simple', $2)
 ORDER BY t.message_id DESC LIMIT $13"
);

// The index. The workspace is one of the search terms. `+ 0` keeps the planner from the primary key, which could
// only filter by scanning all messages of the workspace.
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
    /// Searches messages. Returns at most `limit` matches without their texts, and the bytes of these; best first, the
    /// newer one first among equals.
    ///
    /// Of more than [`MAX_RANKED`] matches only the newest are ranked. Only the first 32 768 characters of a text are
    /// searched.
    pub async fn search(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        limit: usize,
    ) -> StoreResult<Vec<(FoundMessage, usize)>> {
        let edge = self.search_edge(scope, query.before).await?;
        let Some(edge) = edge.filter(|_| !query.text.trim().is_empty()) else { return Ok(Vec::new()) };
        // A query without any term (`-`, `""`, `!!`) finds nothing.
        let without_terms: bool = sqlx::query_scalar("SELECT numnode(websearch_to_tsquery('simple', $1)) = 0")
            .bind(query.text)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("parsing a search query"))?;
        if without_terms {
            return Ok(Vec::new());
        }
        // The tail first: a message that is indexed meanwhile is then found twice rather than not at all.
        let mut found = self.search_tail(scope, reader, query, &edge).await?;
        let mut below = i64::from(i32::MAX);
        let mut first = edge.newest_block + 1;
        for blocks in NEWEST_BLOCKS.into_iter().map(Some).chain([None]) {
            if found.len() >= MAX_RANKED || first <= 0 {
                break;
            }
            let from = blocks.map_or(0, |blocks| (first - blocks).max(0));
            // A search of all blocks needs no list of them.
            let listed = (from > 0).then_some(from..first);
            found.extend(self.search_blocks(scope, reader, query, listed, below).await?);
            (below, first) = (from, from);
        }
        // A message that is indexed between two of these statements is found by both.
        let mut seen = HashSet::new();
        found.retain(|(id, _)| seen.insert(*id));
        // Newest first up to here, so that the newest are ranked.
        found.truncate(MAX_RANKED);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        found.truncate(limit);
        self.found_messages(scope, &found).await
    }

    async fn search_edge(&self, scope: WorkspaceScope, before: Option<MessageId>) -> StoreResult<Option<IndexEdge>> {
        // Blocks follow the ids, except for messages that became visible late: those are one block off.
        // `least` passes over the null that a search without `before` has.
        sqlx::query_as(
            "SELECT coalesce(p.settled_id, 0) AS settled_id,
                    least((coalesce(p.indexed_count, 0) - 1) / 8192,
                          1 + (SELECT s.block FROM message_search s
                                WHERE s.workspace_id = $1 AND s.message_id < $2 AND s.created_on <= $3
                                ORDER BY s.message_id DESC LIMIT 1)) AS newest_block
               FROM workspaces w LEFT JOIN search_progress p USING (workspace_id) WHERE w.workspace_id = $1",
        )
        .bind(scope.workspace_id())
        .bind(before)
        .bind(before.map(|before| day_of_id(before.get()).min(last_day())))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the end of the search index"))
    }

    async fn search_tail(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        edge: &IndexEdge,
    ) -> StoreResult<Vec<Ranked>> {
        let after = query.after.map_or(-1, MessageId::get);
        let (first_day, last_day) = days(after.max(edge.settled_id), query.before);
        sqlx::query_as(TAIL)
            .bind(scope.workspace_id())
            .bind(query.text)
            .bind(edge.settled_id)
            .bind(after)
            .bind(query.before.map_or(i64::MAX, MessageId::get))
            .bind(first_day)
            .bind(last_day)
            .bind(MAX_UNSETTLED)
            .bind(query.channel)
            .bind(query.from)
            .bind(reader.agent())
            .bind(MAX_UNINDEXED)
            .bind(MAX_RANKED as i64)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("searching messages that are not indexed yet"))
    }

    /// Searches the listed blocks, or all blocks, below a block.
    async fn search_blocks(
        &self,
        scope: WorkspaceScope,
        reader: &Reader,
        query: &SearchQuery<'_>,
        listed: Option<std::ops::Range<i64>>,
        below: i64,
    ) -> StoreResult<Vec<Ranked>> {
        let after = query.after.map_or(-1, MessageId::get);
        let (first_day, last_day) = days(after, query.before);
        sqlx::query_as(BLOCKS)
            .bind(scope.workspace_id())
            .bind(query.text)
            .bind(mark_terms(scope, query, listed))
            .bind(after)
            .bind(query.before.map_or(i64::MAX, MessageId::get))
            .bind(first_day)
            .bind(last_day)
            .bind(i32::try_from(below).unwrap_or(i32::MAX))
            .bind(reader.agent())
            .bind(MAX_RANKED as i64)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("searching messages"))
    }

    /// Reads the columns of the matches, in their order.
    async fn found_messages(&self, scope: WorkspaceScope, found: &[Ranked]) -> StoreResult<Vec<(FoundMessage, usize)>> {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<MessageId> = found.iter().map(|(id, _)| *id).collect();
        let rows = sqlx::query(formatcp!(
            "SELECT m.message_id, m.channel_id, c.name AS channel_name, c.conversation_id, m.agent_id, m.agent_name,
                    '' AS text, octet_length(m.text)::bigint AS content_bytes, m.created_at, m.thread_id
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
               {MESSAGES_BY_KEY}
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id"
        ))
        .bind(scope.workspace_id())
        .bind(&ids)
        .bind(days_of(&ids))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading search results"))?;
        let mut rows: Vec<(FoundMessage, usize)> = decode_sized("messages", &rows)?;
        rows.sort_by_key(|(row, _)| ids.iter().position(|id| *id == row.message_id));
        for (row, _) in &mut rows {
            row.score = found.iter().find(|(id, _)| *id == row.message_id).map_or(0.0, |(_, score)| *score);
        }
        Ok(rows)
    }
}

/// First and last possible day of messages between two ids.
fn days(after: i64, before: Option<MessageId>) -> (NaiveDate, NaiveDate) {
    (day_of_id(after.max(0)), before.map_or(NaiveDate::MAX, |before| day_of_id(before.get())).min(last_day()))
}

/// The latest day, which both Postgres and chrono can represent.
fn last_day() -> NaiveDate {
    // The date exists.
    NaiveDate::from_ymd_opt(9999, 12, 31).unwrap_or_default()
}

/// Terms that restrict a search to a workspace, blocks, a channel and an author. They start with a space, which no
/// word of a text does.
fn mark_terms(scope: WorkspaceScope, query: &SearchQuery<'_>, blocks: Option<std::ops::Range<i64>>) -> String {
    let workspace = scope.workspace_id().get();
    let place = match blocks {
        Some(blocks) => blocks.map(|block| format!("' w{workspace}.{block}'")).collect::<Vec<_>>().join(" | "),
        None => format!("' w{workspace}'"),
    };
    let mut marks = format!("({place})");
    if let Some(channel) = query.channel {
        marks.push_str(&format!(" & ' c{channel}'"));
    }
    // The name stands within a quoted term.
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
    fn mark_terms_escape_author_names() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let query = SearchQuery {
            text: "x",
            channel: Some(ChannelId::new(3)),
            from: Some(r"o'brien\' | ' w8"),
            before: None,
            after: None,
        };
        assert_eq!(mark_terms(scope, &query, Some(4..6)), r"(' w7.4' | ' w7.5') & ' c3' & ' no''brien\\'' | '' w8'");
        assert_eq!(mark_terms(scope, &SearchQuery { channel: None, from: None, ..query }, None), "(' w7')");
    }
}
