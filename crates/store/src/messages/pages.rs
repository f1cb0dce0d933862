//! Pages of the root messages of channels and conversations, newest first ([`ChannelPage`]).
//!
//! Most pages are the newest messages of a channel that is used. One statement finds the channel and reads its messages
//! of the last days, with their contents if these are small. It names the days, so that it opens only their partitions:
//! a statement over all days opens one for each day of the retention. It also tells whether any message in its range of
//! ids has replies, readers or reactions, and only those that occur are counted. Older messages follow by their ids and
//! sizes, and are read a few at a time.

use std::{cmp::Reverse, collections::HashMap};

use chrono::{DateTime, Days, NaiveDate, NaiveTime, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{
    AgentId, ChannelId, MessageId, WorkspaceScope,
    messages::{ListedMessage, MessagePage, ReactionCount},
    observers::ObserverFilters,
    snowflake,
};
use sqlx::{
    AssertSqlSafe, FromRow, Postgres,
    postgres::{PgArguments, PgRow},
    query::Query,
    types::Json,
};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    decode::{decode_row, decode_rows},
    messages::{
        contents::days_of,
        days::{LAST_DAY, day_of, day_of_id},
        queries::{REACTIONS, count_readers, count_replies, with_sizes},
        row::MessageRow,
    },
    observers::filters,
    sizes::MESSAGE_BYTES,
};

/// Channel or conversation by its public key.
#[derive(Debug, Clone, Copy)]
pub enum ChannelKey<'a> {
    /// Channel of that name, archived or not.
    Name(&'a str),
    /// Conversation of that id, and the agent that reads it.
    Conversation(&'a str, AgentId),
}

/// Selection of a page.
#[derive(Debug, Clone, Copy)]
pub struct ChannelPageQuery<'a> {
    pub channel: ChannelKey<'a>,
    pub page: MessagePage,
    /// Authors and ages that the reader sees.
    pub filters: &'a ObserverFilters,
    pub at: DateTime<Utc>,
    /// Bound of the contents that are read with the page; `None` reads none. What is not read is left to the caller.
    pub max_bytes: Option<usize>,
}

/// First messages of a page with their contents, and the others.
#[derive(Debug)]
pub struct ChannelPage {
    pub channel_id: ChannelId,
    /// False if the reader takes no part in the conversation. The page is empty then.
    pub is_readable: bool,
    pub messages: Vec<ListedMessage>,
    /// Upper bound of their contents.
    pub bytes: usize,
    /// Messages after these, with upper bounds of their bytes.
    pub rest: Vec<(MessageId, usize)>,
}

/// Condition of a page (`$3` to `$7`) on the root messages `m` of a channel.
macro_rules! in_page {
    ($channel:literal) => {
        concat!(
            "m.workspace_id = $1 AND m.channel_id = ",
            $channel,
            " AND m.thread_id IS NULL AND m.message_id < $3 AND m.message_id > $4 AND m.created_at >= $6
              AND ($7::bigint[] IS NULL OR m.agent_id = ANY ($7))"
        )
    };
}

type PageStatement<'q> = Query<'q, Postgres, PgArguments>;

/// Binds the parameters of [`in_page`], and the limit `$5`.
fn bind_page<'q>(query: PageStatement<'q>, page: MessagePage, filters: &'q ObserverFilters) -> PageStatement<'q> {
    let (not_before, above) = filters::not_before(filters);
    query
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get).max(above))
        .bind(page.limit)
        .bind(not_before)
        .bind(filters::agent_ids(filters))
}

/// Selects the channel of workspace `$1` that `$2` names.
const BY_NAME: &str = formatcp!(
    "SELECT channel_id, name, type, conversation_id, true AS is_readable FROM channels
      WHERE workspace_id = $1 AND name = $2 AND type = {CHANNEL}"
);

/// Selects the conversation `$2`, which agent `$9` reads.
const BY_CONVERSATION: &str = "
    SELECT c.channel_id, c.name, c.type, c.conversation_id,
           EXISTS (SELECT FROM channel_members m
                    WHERE m.workspace_id = $1 AND m.channel_id = c.channel_id AND m.agent_id = $9) AS is_readable
      FROM channels c WHERE c.workspace_id = $1 AND c.conversation_id = $2";

/// Returns the statement that reads a page of the channel that `channel` selects, from the partitions of these days. It
/// has a row without a message if there is none, and contents if those of all messages take at most `$8` bytes; with
/// NULL none.
fn recent_page(channel: &str, (first, last): (NaiveDate, NaiveDate)) -> String {
    const IN_PAGE: &str = in_page!("c.channel_id");
    const IN_SPAN: &str = "BETWEEN (SELECT oldest FROM span) AND (SELECT newest FROM span)";
    let days = format!("created_on BETWEEN DATE '{first}' AND DATE '{last}'");
    format!(
        "WITH c AS MATERIALIZED ({channel}),
              page AS MATERIALIZED (
                  SELECT m.*
                    FROM c CROSS JOIN LATERAL (
                         SELECT m.*, {MESSAGE_BYTES}::bigint AS content_bytes FROM messages m
                          WHERE {IN_PAGE} AND m.{days} ORDER BY m.message_id DESC LIMIT $5) AS m
                   WHERE c.is_readable),
              span AS MATERIALIZED (
                  SELECT min(message_id) AS oldest, max(message_id) AS newest, sum(content_bytes)::bigint AS bytes
                    FROM page)
         SELECT c.channel_id, c.is_readable, c.name AS channel_name, c.type AS channel_type, c.conversation_id,
                m.message_id, m.content_bytes, bytes, m.agent_id AS author_id, m.agent_name AS author_name,
                m.agent_type, m.thread_id,
                CASE WHEN bytes <= $8 THEN m.text END AS text, CASE WHEN bytes <= $8 THEN m.blocks END AS blocks,
                CASE WHEN bytes <= $8 THEN m.metadata END AS metadata,
                CASE WHEN bytes <= $8 THEN m.attachments END AS attachments,
                m.mentions, m.mode, m.content_type, m.created_at,
                EXISTS (SELECT FROM messages
                         WHERE workspace_id = $1 AND thread_id {IN_SPAN} AND {days}) AS has_replies,
                EXISTS (SELECT FROM message_reads WHERE workspace_id = $1 AND message_id {IN_SPAN})
                OR EXISTS (SELECT FROM deliveries
                            WHERE workspace_id = $1 AND source_id {IN_SPAN} AND {days}) AS has_readers,
                EXISTS (SELECT FROM message_reactions
                         WHERE workspace_id = $1 AND message_id {IN_SPAN}) AS has_reactions
           FROM c CROSS JOIN span LEFT JOIN page m ON true"
    )
}

/// Counts that may not be zero for some message of a page.
#[derive(Debug, Clone, Copy, FromRow)]
struct PresentCounts {
    has_replies: bool,
    has_readers: bool,
    has_reactions: bool,
}

impl PresentCounts {
    fn has_any(self) -> bool {
        self.has_replies || self.has_readers || self.has_reactions
    }
}

/// Stands for counts that are zero for all messages.
const NO_COUNTS: &str = "SELECT NULL::bigint AS message_id, NULL::bigint AS count, NULL::json AS reactions WHERE false";

/// Returns the statement that counts the replies, readers or reactions that are present, of the messages `$2` of the
/// days `$3`.
fn count_present(present: PresentCounts, first: NaiveDate, last: NaiveDate) -> String {
    let replies = present.has_replies.then(|| count_replies(first));
    let readers = present.has_readers.then(|| count_readers(first, last));
    let (replies, readers) = (replies.as_deref().unwrap_or(NO_COUNTS), readers.as_deref().unwrap_or(NO_COUNTS));
    let reactions = if present.has_reactions { REACTIONS } else { NO_COUNTS };
    format!(
        "SELECT k.message_id, coalesce(replies.count, 0) AS reply_count, coalesce(readers.count, 0) AS read_by_count,
                coalesce(reactions.reactions, '[]') AS reactions
           FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
           LEFT JOIN ({replies}) AS replies ON replies.message_id = k.message_id
           LEFT JOIN ({readers}) AS readers ON readers.message_id = k.message_id
           LEFT JOIN ({reactions}) AS reactions ON reactions.message_id = k.message_id"
    )
}

#[derive(FromRow)]
struct CountsRow {
    message_id: MessageId,
    reply_count: i64,
    read_by_count: i64,
    reactions: Json<Vec<ReactionCount>>,
}

/// Columns of [`recent_page`] that all of its rows have in common.
#[derive(FromRow)]
struct ChannelRow {
    channel_id: ChannelId,
    is_readable: bool,
    /// Upper bound of the contents of all messages; `None` without any.
    bytes: Option<i64>,
    #[sqlx(flatten)]
    present: PresentCounts,
}

/// Message whose contents are not read.
#[derive(FromRow)]
struct SizeRow {
    message_id: MessageId,
    content_bytes: i64,
}

impl Store {
    /// Reads a page of a channel. `None` without such a channel.
    pub async fn channel_page(
        &self,
        scope: WorkspaceScope,
        query: &ChannelPageQuery<'_>,
    ) -> StoreResult<Option<ChannelPage>> {
        // Clocks that differ may put messages into the day after today.
        let today = day_of(query.at);
        let (first, last) = (today - Days::new(1), today + Days::new(1));
        let (text, key, reader) = match query.channel {
            ChannelKey::Name(name) => (recent_page(BY_NAME, (first, last)), name, None),
            ChannelKey::Conversation(id, reader) => (recent_page(BY_CONVERSATION, (first, last)), id, Some(reader)),
        };
        let statement = sqlx::query(AssertSqlSafe(text)).bind(scope.workspace_id()).bind(key);
        let statement = bind_page(statement, query.page, query.filters);
        let statement = statement.bind(query.max_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)));
        // Only the text for conversations has `$9`.
        let statement = if let Some(reader) = reader { statement.bind(reader) } else { statement };
        let rows = statement
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading the newest messages of a channel"))?;
        let Some(row) = rows.first() else { return Ok(None) };
        let ChannelRow { channel_id, is_readable, bytes, present } = decode_row("channels", row)?;
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let (mut messages, mut rest) = (Vec::new(), Vec::new());
        match bytes {
            None => {}
            Some(bytes) if query.max_bytes.is_some_and(|most| bytes <= most) => {
                messages = self.with_counts(scope, decode_rows("messages", &rows)?, present).await?;
            }
            Some(_) => rest = decode_sizes(&rows)?,
        }
        let first_id =
            MessageId::new(snowflake::first_id_at(first.and_time(NaiveTime::MIN).and_utc().timestamp_millis()));
        let left = query.page.limit - i64::try_from(messages.len() + rest.len()).unwrap_or(0);
        // A channel has no messages of days before its own.
        // Without `after` the last condition holds, because `None` is less than every id.
        let has_older =
            is_readable && left > 0 && day_of_id(channel_id.get()) <= first && query.page.after < Some(first_id);
        if has_older {
            let before = query.page.before.map_or(first_id, |before| before.min(first_id));
            let older = MessagePage { before: Some(before), limit: left, ..query.page };
            rest.append(&mut self.channel_messages(scope, channel_id, older, query.filters).await?);
        }
        // Without messages only sizes were read, and the page holds no contents.
        let bytes = bytes.filter(|_| !messages.is_empty()).unwrap_or(0);
        Ok(Some(ChannelPage { channel_id, is_readable, messages, bytes, rest }))
    }

    /// Lists the root messages of a channel or conversation whose author and age pass the filters, newest first, with
    /// upper bounds of their bytes.
    pub async fn channel_messages(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<(MessageId, usize)>> {
        let statement = sqlx::query(concatcp!(
            "SELECT m.message_id, ",
            MESSAGE_BYTES,
            "::bigint AS content_bytes FROM messages m WHERE ",
            in_page!("$2"),
            " AND m.created_on <= ",
            LAST_DAY,
            " ORDER BY m.message_id DESC LIMIT $5"
        ));
        let rows = bind_page(statement.bind(scope.workspace_id()).bind(channel), page, filters)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing the messages of a channel"))?;
        decode_sizes(&rows)
    }

    /// Adds replies, readers and reactions to the messages of a page, which are of a few days.
    async fn with_counts(
        &self,
        scope: WorkspaceScope,
        rows: Vec<MessageRow>,
        present: PresentCounts,
    ) -> StoreResult<Vec<ListedMessage>> {
        let mut messages: Vec<ListedMessage> = rows.into_iter().map(|row| row.0.into()).collect();
        // Postgres returns them in this order, but does not promise it.
        messages.sort_unstable_by_key(|listed| Reverse(listed.message.id));
        if !present.has_any() {
            return Ok(messages);
        }
        let ids: Vec<MessageId> = messages.iter().map(|listed| listed.message.id).collect();
        let days = days_of(&ids);
        let (Some(first), Some(last)) = (days.iter().min(), days.iter().max()) else { return Ok(messages) };
        let rows = sqlx::query(AssertSqlSafe(count_present(present, *first, *last)))
            .bind(scope.workspace_id())
            .bind(&ids)
            .bind(&days)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting replies, readers and reactions"))?;
        let counts = decode_rows::<CountsRow>("messages", &rows)?.into_iter();
        let mut counts: HashMap<MessageId, CountsRow> = counts.map(|row| (row.message_id, row)).collect();
        for listed in &mut messages {
            let Some(counted) = counts.remove(&listed.message.id) else { continue };
            (listed.reply_count, listed.read_by_count) = (counted.reply_count, counted.read_by_count);
            listed.reactions = counted.reactions.0;
        }
        Ok(messages)
    }
}

/// Decodes messages without their contents, newest first.
fn decode_sizes(rows: &[PgRow]) -> StoreResult<Vec<(MessageId, usize)>> {
    let rows: Vec<SizeRow> = decode_rows("messages", rows)?;
    let mut sizes = with_sizes(rows.into_iter().map(|row| (row.message_id, row.content_bytes)).collect());
    sizes.sort_unstable_by_key(|(id, _)| Reverse(*id));
    Ok(sizes)
}
