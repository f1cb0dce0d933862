//! Reads of delivery rows in seq order for replay, gap repair and republishing, and of their contents.
//!
//! Rows come first, with the sizes of their contents; the caller selects those that fit into its budget of bytes and
//! reads their contents. A message is read once, whatever the number of its recipients.

use std::{collections::HashMap, sync::Arc};

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, InvocationId, MessageId, SourceId, WorkspaceId, WorkspaceScope,
    mailboxes::{Content, StoredDelivery, delivery::SourceKind, stream::Seq},
};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    actions::outcomes::OutcomeFacts,
    codes::{ACTION_RESULT_SOURCE, MESSAGE_SOURCE},
    decode::{decode_row, decode_rows, json_text, to_count},
    messages::{
        days::{day_of, day_of_id},
        row::MessageRow,
    },
    sizes::{MESSAGE_BYTES, OUTCOME_BYTES},
    statement_timeout::StatementTimeout as _,
};

/// Older rows have expired, whatever their workspace's TTL (six days at most), so replay need not read their
/// partitions.
const OLDEST_LIVE_ROW: TimeDelta = TimeDelta::days(7);

/// Page of a mailbox.
#[derive(Debug)]
pub struct MailboxPage {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    /// Highest seq that existed when the rows were read.
    pub head: Seq,
    /// In seq order. A seq without a row was dropped with its partition.
    pub rows: Vec<StoredDelivery>,
}

/// Row of a page; a mailbox without rows has one without a delivery.
struct PageRow {
    scope: WorkspaceScope,
    agent_id: AgentId,
    head: Seq,
    delivery: Option<StoredDelivery>,
}

/// Key of the message or invocation of a delivery.
type SourceKey = (WorkspaceId, SourceId);

/// Row with [`COLUMNS`].
pub(crate) struct StoredDeliveryRow(pub(crate) StoredDelivery);

pub(crate) const COLUMNS: &str = formatcp!(
    "a.workspace_id, a.agent_id, a.name AS recipient_name, a.node_id, a.provider,
    d.seq, d.source_kind, d.source_id, d.redrive_no, d.mode AS delivery_mode, d.expires_at, x.state,
    m.agent_id AS sender_id,
    CASE WHEN m.message_id IS NOT NULL THEN {MESSAGE_BYTES}
         WHEN i.invocation_id IS NOT NULL THEN {OUTCOME_BYTES} END AS content_bytes"
);

/// Joins the recipients as `a`.
pub(crate) const RECIPIENT_JOIN: &str = "
    JOIN agents a ON a.workspace_id = d.workspace_id AND a.agent_id = d.agent_id";

/// Joins settlements, messages and outcomes.
pub(crate) const SOURCE_JOINS: &str = formatcp!("{SETTLEMENT_JOIN} {MESSAGE_JOIN} {OUTCOME_JOIN}");

const SETTLEMENT_JOIN: &str = "
    LEFT JOIN delivery_exceptions x
           ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq";

/// The day of a message follows from its id, so that one partition is searched: the milliseconds since 2025 are above
/// the 22 lowest bits.
const MESSAGE_JOIN: &str = formatcp!(
    "
    LEFT JOIN messages m
           ON d.source_kind = {MESSAGE_SOURCE} AND m.workspace_id = d.workspace_id AND m.message_id = d.source_id
          AND m.created_on = DATE '2025-01-01' + ((d.source_id >> 22) / 86400000)::integer"
);

const OUTCOME_JOIN: &str = formatcp!("
    LEFT JOIN invocations i
           ON d.source_kind = {ACTION_RESULT_SOURCE} AND i.workspace_id = d.workspace_id AND i.invocation_id = d.source_id");

/// Returns the statement that reads the messages with the keys `$1`, `$2` and `$3`. If all are of one day, it is part
/// of the text, as in [`Store::mailbox_pages`]: a text for each range of days would be planned too often.
///
/// `OFFSET 0` keeps the planner from joining the channels first, by their workspace: it would read every message of the
/// workspace while the tables have no statistics.
fn select_messages(day: Option<NaiveDate>) -> String {
    let day = day.map(|day| format!("AND created_on = DATE '{day}'")).unwrap_or_default();
    format!(
        "SELECT m.workspace_id, m.message_id, m.created_at, m.channel_id, ch.name AS channel_name, ch.type AS channel_type,
                ch.conversation_id, m.agent_id AS author_id, m.agent_name AS author_name, m.agent_type, m.thread_id,
                m.text, m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type
           FROM unnest($1::bigint[], $2::bigint[], $3::date[]) AS k (workspace_id, message_id, created_on)
          CROSS JOIN LATERAL (
                SELECT * FROM messages
                 WHERE workspace_id = k.workspace_id AND message_id = k.message_id AND created_on = k.created_on {day}
                OFFSET 0) AS m
           JOIN channels ch ON ch.workspace_id = m.workspace_id AND ch.channel_id = m.channel_id"
    )
}

const OUTCOMES: &str = "
SELECT i.workspace_id, i.invocation_id, i.action_name, i.status, i.output, i.error
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, invocation_id)
  JOIN invocations i USING (workspace_id, invocation_id)";

impl Store {
    /// Reads a page of each mailbox from the given seq on: at most `page` rows in order, and the head that it had then.
    /// Rows that have expired long before `now` are not read, and contents are left unread. The pages come in the order
    /// of their keys, without those of deleted agents.
    pub async fn mailbox_pages(
        &self,
        positions: &[(WorkspaceScope, AgentId, Seq)],
        page: i64,
        now: DateTime<Utc>,
    ) -> StoreResult<Vec<MailboxPage>> {
        // With days that are bound, each execution would lock and open the partitions of all days, and each connection
        // plan for them.
        let (first_day, last_day) = (day_of(now - OLDEST_LIVE_ROW), day_of(now + TimeDelta::days(1)));
        let mut pages =
            self.read_pages(positions, page, &format!("BETWEEN DATE '{first_day}' AND DATE '{last_day}'")).await?;
        // A missing row was dropped, or the clock of its writer or of this process was days off: only Postgres' clock
        // tells, before a tombstone stands for it.
        let from: HashMap<_, _> = positions.iter().map(|(scope, agent, from)| ((*scope, *agent), *from)).collect();
        let incomplete: Vec<_> = pages
            .iter()
            .filter_map(|read| {
                let from = *from.get(&(read.scope, read.agent_id))?;
                let expected = page.min(read.head - from + 1);
                (i64::try_from(read.rows.len()).is_ok_and(|rows| rows < expected)).then_some((
                    read.scope,
                    read.agent_id,
                    from,
                ))
            })
            .collect();
        if !incomplete.is_empty() {
            let days = format!(">= (relay_now() AT TIME ZONE 'UTC')::date - {}", OLDEST_LIVE_ROW.num_days());
            let again = self.read_pages(&incomplete, page, &days).await?;
            let mut again: HashMap<_, _> = again.into_iter().map(|page| ((page.scope, page.agent_id), page)).collect();
            for read in &mut pages {
                if let Some(page) = again.remove(&(read.scope, read.agent_id)) {
                    *read = page;
                }
            }
        }
        Ok(pages)
    }

    /// Reads pages of the rows of these `days`, a condition on `created_on`.
    async fn read_pages(
        &self,
        positions: &[(WorkspaceScope, AgentId, Seq)],
        page: i64,
        days: &str,
    ) -> StoreResult<Vec<MailboxPage>> {
        let workspaces: Vec<WorkspaceId> = positions.iter().map(|(scope, _, _)| scope.workspace_id()).collect();
        let agents: Vec<AgentId> = positions.iter().map(|(_, agent, _)| *agent).collect();
        let from: Vec<Seq> = positions.iter().map(|(_, _, seq)| *seq).collect();
        // Head and rows come from one snapshot: a later head would count rows that were not read.
        let query = format!(
            "SELECT {COLUMNS}, h.next_seq
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, from_seq)
              -- `OFFSET 0`: by their keys, also while the table has no statistics.
              CROSS JOIN LATERAL (SELECT * FROM agents
                                   WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id OFFSET 0) AS a
               JOIN mailbox_heads h ON h.workspace_id = k.workspace_id AND h.agent_id = k.agent_id
               LEFT JOIN LATERAL (
                    SELECT * FROM deliveries
                     WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id
                       AND seq >= k.from_seq AND created_on {days}
                     ORDER BY seq LIMIT $4) AS d ON true
               {SETTLEMENT_JOIN} {MESSAGE_JOIN} {OUTCOME_JOIN}
              WHERE a.deleted_at IS NULL
              ORDER BY a.workspace_id, a.agent_id, d.seq"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(workspaces)
            .bind(agents)
            .bind(from)
            .bind(page)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading deliveries from a position"))?;
        let mut pages: Vec<MailboxPage> = Vec::with_capacity(positions.len());
        for row in &rows {
            let PageRow { scope, agent_id, head, delivery } = decode_row("deliveries", row)?;
            // Rows are sorted by mailbox, so only the last page can go on.
            match pages.last_mut().filter(|page| (page.scope, page.agent_id) == (scope, agent_id)) {
                Some(page) => page.rows.extend(delivery),
                None => pages.push(MailboxPage { scope, agent_id, head, rows: delivery.into_iter().collect() }),
            }
        }
        Ok(pages)
    }

    /// Reads the deliveries of these messages for republishing: all of them, or those of a range of agents. Contents
    /// are left unread.
    pub async fn deliveries_of_sources(
        &self,
        sources: &[(WorkspaceScope, MessageId)],
        agents: Option<(AgentId, AgentId)>,
    ) -> StoreResult<Vec<StoredDelivery>> {
        let workspaces: Vec<WorkspaceId> = sources.iter().map(|(scope, _)| scope.workspace_id()).collect();
        let ids: Vec<MessageId> = sources.iter().map(|(_, id)| *id).collect();
        let query = format!(
            "SELECT {COLUMNS}
               FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, source_id)
               JOIN deliveries d ON d.workspace_id = k.workspace_id AND d.source_id = k.source_id
                    AND d.agent_id BETWEEN $3 AND $4
               {RECIPIENT_JOIN} {SOURCE_JOINS}
              ORDER BY d.workspace_id, d.agent_id, d.seq"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(workspaces)
            .bind(ids)
            .bind(agents.map_or(i64::MIN, |(first, _)| first.get()))
            .bind(agents.map_or(i64::MAX, |(_, last)| last.get()))
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the deliveries of messages"))?;
        let rows: Vec<StoredDeliveryRow> = decode_rows("deliveries", &rows)?;
        Ok(rows.into_iter().map(|row| row.0).collect())
    }

    /// Reads the contents of these rows, each once. A content that is no longer kept becomes [`Content::Dropped`].
    pub async fn read_contents<'a>(&self, rows: impl IntoIterator<Item = &'a mut StoredDelivery>) -> StoreResult<()> {
        let mut unread: Vec<(&mut StoredDelivery, SourceKind)> = rows
            .into_iter()
            .filter_map(|row| match row.content {
                Content::Unread { kind, .. } => Some((row, kind)),
                Content::Message(_) | Content::Outcome { .. } | Content::Dropped => None,
            })
            .collect();
        let mut found = HashMap::new();
        for kind in [SourceKind::Message, SourceKind::ActionResult] {
            let mut sources: Vec<SourceKey> = unread
                .iter()
                .filter(|(_, own)| *own == kind)
                .map(|(row, _)| (row.scope.workspace_id(), row.source_id))
                .collect();
            sources.sort_unstable();
            sources.dedup();
            if sources.is_empty() {
                continue;
            }
            let contents = match kind {
                SourceKind::Message => self.message_contents(&sources).await?,
                SourceKind::ActionResult => self.outcome_contents(&sources).await?,
                // Never unread: a notice has no content.
                SourceKind::Notice => Vec::new(),
            };
            found.extend(contents.into_iter().map(|(source, content)| ((kind, source), content)));
        }
        for (row, kind) in &mut unread {
            let source = (*kind, (row.scope.workspace_id(), row.source_id));
            // Not found: retention removed the source since its delivery was read.
            row.content = found.get(&source).cloned().unwrap_or(Content::Dropped);
        }
        Ok(())
    }

    async fn message_contents(&self, ids: &[SourceKey]) -> StoreResult<Vec<(SourceKey, Content)>> {
        let doing = "reading the messages of deliveries";
        let days: Vec<NaiveDate> = ids.iter().map(|(_, id)| day_of_id(id.get())).collect();
        let day = days.first().copied().filter(|first| days.iter().all(|day| day == first));
        let rows = sqlx::query(sqlx::AssertSqlSafe(select_messages(day)))
            .bind(ids.iter().map(|(workspace, _)| *workspace).collect::<Vec<_>>())
            .bind(ids.iter().map(|(_, id)| *id).collect::<Vec<_>>())
            .bind(&days)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // Each row is freed as it is decoded, since both copies of all messages together would be large.
        let contents = rows.into_iter().map(|row| {
            let workspace = row.try_get("workspace_id").map_err(StoreError::from_sqlx(doing))?;
            let MessageRow(message) = decode_row("messages", &row)?;
            Ok(((workspace, message.id.into()), Content::Message(Arc::new(message))))
        });
        contents.collect()
    }

    async fn outcome_contents(&self, ids: &[SourceKey]) -> StoreResult<Vec<(SourceKey, Content)>> {
        let rows = sqlx::query(OUTCOMES)
            .bind(ids.iter().map(|(workspace, _)| *workspace).collect::<Vec<_>>())
            .bind(ids.iter().map(|(_, id)| *id).collect::<Vec<_>>())
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the outcomes of deliveries"))?;
        let contents = rows.into_iter().map(|row| {
            let OutcomeRow(source, outcome) = decode_row("invocations", &row)?;
            Ok((source, Content::Outcome { kind: outcome.kind(), data: outcome.data() }))
        });
        contents.collect()
    }
}

struct OutcomeRow(SourceKey, OutcomeFacts);

impl FromRow<'_, PgRow> for OutcomeRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let invocation_id: InvocationId = row.try_get("invocation_id")?;
        let outcome = OutcomeFacts {
            invocation_id,
            action_name: row.try_get("action_name")?,
            status: row.try_get("status")?,
            output: json_text(row, "output")?,
            error: row.try_get("error")?,
        };
        Ok(Self((row.try_get("workspace_id")?, invocation_id.into()), outcome))
    }
}

impl FromRow<'_, PgRow> for PageRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let has_delivery = row.try_get::<Option<Seq>, _>("seq")?.is_some();
        let delivery = has_delivery.then(|| StoredDeliveryRow::from_row(row)).transpose()?;
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            agent_id: row.try_get("agent_id")?,
            head: row.try_get::<Seq, _>("next_seq")? - 1,
            delivery: delivery.map(|row| row.0),
        })
    }
}

impl FromRow<'_, PgRow> for StoredDeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let kind: SourceKind = row.try_get("source_kind")?;
        let bytes: Option<i32> = row.try_get("content_bytes")?;
        let content = match bytes {
            Some(bytes) => Content::Unread { kind, bytes: to_count("content_bytes", bytes)? },
            None => Content::Dropped,
        };
        Ok(Self(StoredDelivery {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            agent_id: row.try_get("agent_id")?,
            agent_name: row.try_get("recipient_name")?,
            location: (row.try_get("node_id")?, row.try_get("provider")?),
            seq: row.try_get("seq")?,
            source_id: row.try_get("source_id")?,
            redrive_no: row.try_get("redrive_no")?,
            mode: row.try_get("delivery_mode")?,
            expires_at: row.try_get("expires_at")?,
            settlement: row.try_get("state")?,
            sender: row.try_get("sender_id")?,
            content,
        }))
    }
}
