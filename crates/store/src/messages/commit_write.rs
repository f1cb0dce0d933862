//! The part of a commit that writes a batch's messages and deliveries, and its columns. Used by
//! [`crate::messages::commit_at_once`] and [`crate::messages::commit_in_steps`].

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::{
    AgentId, ChannelId, FileId, JsonText, MessageId, WorkspaceId,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
};
use sqlx::{FromRow, Postgres, postgres::PgArguments, query::Query};

use crate::{
    StoreError, StoreResult,
    connections::DatabaseSession,
    messages::{
        batch::{NewRecipient, NewSend, WrittenDelivery},
        commit_facts::{AgentFacts, BatchFacts},
        days::day_of,
    },
};

/// CTEs that write the deliveries of `want`, which the caller defines. The result is `fitted`.
///
/// Heads are locked in (workspace, agent) order, each mailbox's rows are ranked under that lock, and the first
/// that fit under the depth cap get the next seqs. The depth of a mailbox is the distance from its settled
/// floor to its head, less the settlements in between, which are counted only when the mailbox looks full.
/// `MATERIALIZED` keeps the planner from evaluating the locking part more than once or in another order. It locks while
/// it joins: the planner expects few rows of a CTE, and would join two of them by comparing every row with every other.
// Cursors are read without a lock, for which acks would wait. Floors only rise, so an older one makes a mailbox look
// fuller, never emptier.
macro_rules! written_deliveries {
    () => {
        const_format::concatcp!(
            "locked AS MATERIALIZED (
    SELECT w.*, h.next_seq
      FROM want w
      JOIN mailbox_heads h USING (workspace_id, agent_id)
     ORDER BY w.workspace_id, w.agent_id, w.ord
       FOR UPDATE OF h
), ranked AS (
    SELECT l.*, row_number() OVER (PARTITION BY l.workspace_id, l.agent_id ORDER BY l.ord) AS rank
      FROM locked l
), fitted AS MATERIALIZED (
    SELECT r.*,
           CASE WHEN r.next_seq - 1 - c.settled_floor + r.rank <= r.depth THEN true
                ELSE r.next_seq - 1 - c.settled_floor + r.rank <= r.depth
                     + ",
            $crate::mailboxes::settled_floors::count_settled_above!("c", "c.settled_floor"),
            "
           END AS fits
      FROM ranked r
      JOIN mailbox_cursors c USING (workspace_id, agent_id)
), bumped AS (
    UPDATE mailbox_heads h
       SET next_seq = b.next_seq
      FROM (SELECT workspace_id, agent_id, max(next_seq + rank) AS next_seq
              FROM fitted WHERE fits GROUP BY workspace_id, agent_id) AS b
     WHERE h.workspace_id = b.workspace_id AND h.agent_id = b.agent_id
    RETURNING 1
), delivered AS (
    INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, channel_id, node_id,
                            mode, reason, created_at, expires_at)
    SELECT workspace_id, agent_id, next_seq + rank - 1, created_on, source_id, channel_id, node_id,
           mode, reason, created_at, expires_at
      FROM fitted WHERE fits
    RETURNING 1
)"
        )
    };
}
pub(crate) use written_deliveries;

/// CTEs that write the rows of `want` and of the messages `stored_rows` and attachments `attached_rows`, which the
/// caller defines.
// `in_session` records the session that the author is bound to now: a later read could not find it out.
macro_rules! written_rows {
    () => {
        const_format::concatcp!(
            $crate::messages::commit_write::written_deliveries!(),
            ", stored AS (
    INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name,
                          agent_type, thread_id, text, blocks, metadata, attachments, mentions, mode,
                          content_type, created_at, traceparent)
    SELECT workspace_id, message_id, created_on, channel_id, agent_id, agent_name,
           agent_type, thread_id, text, blocks::json, metadata::json, attachments::json,
           string_to_array(mentions, ' '), mode, content_type, created_at, traceparent
      FROM stored_rows
    RETURNING 1
), attached AS (
    INSERT INTO file_attachments (workspace_id, file_id, message_id, created_on)
    SELECT workspace_id, file_id, message_id, created_on FROM attached_rows
    RETURNING 1
), in_session AS (
    INSERT INTO session_messages (workspace_id, session_ref, message_id, created_on)
    SELECT s.workspace_id, author.session_ref, s.message_id, s.created_on
      FROM stored_rows s JOIN agents author USING (workspace_id, agent_id)
     WHERE author.session_ref IS NOT NULL AND author.binding_id IS NOT NULL AND author.deleted_at IS NULL
    RETURNING 1
)"
        )
    };
}
pub(crate) use written_rows;

const WRITE: &str = const_format::concatcp!(
    "
WITH want AS (
    SELECT *
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::date[], $5::bigint[], $6::text[],
                  $7::smallint[], $8::smallint[], $9::timestamptz[], $10::timestamptz[], $11::int[])
           WITH ORDINALITY AS w (workspace_id, agent_id, source_id, created_on, channel_id, node_id,
                                 mode, reason, created_at, expires_at, depth, ord)
), stored_rows AS (
    SELECT *
      FROM unnest($12::bigint[], $13::bigint[], $14::date[], $15::bigint[], $16::bigint[], $17::text[],
                  $18::text[], $19::bigint[], $20::text[], $21::text[], $22::text[], $23::text[],
                  $24::text[], $25::text[], $26::text[], $27::timestamptz[], $28::text[])
           AS s (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, agent_type, thread_id,
                 text, blocks, metadata, attachments, mentions, mode, content_type, created_at, traceparent)
), attached_rows AS (
    SELECT *
      FROM unnest($29::bigint[], $30::bigint[], $31::bigint[], $32::date[])
           AS f (workspace_id, file_id, message_id, created_on)
), ",
    written_rows!(),
    "
SELECT ord, CASE WHEN fits THEN next_seq + rank - 1 END AS seq FROM fitted"
);

pub(crate) type BatchQuery<'q> = Query<'q, Postgres, PgArguments>;

/// One row per delivery, as columns.
#[derive(Default)]
struct DeliveryColumns<'a> {
    workspace: Vec<WorkspaceId>,
    agent: Vec<AgentId>,
    source: Vec<MessageId>,
    day: Vec<NaiveDate>,
    channel: Vec<ChannelId>,
    node: Vec<&'a str>,
    mode: Vec<Mode>,
    reason: Vec<Reason>,
    created_at: Vec<DateTime<Utc>>,
    expires_at: Vec<DateTime<Utc>>,
    depth: Vec<i32>,
}

impl<'a> DeliveryColumns<'a> {
    fn push(
        &mut self,
        send: &NewSend,
        recipient: &NewRecipient,
        agent: &'a AgentFacts,
        expires_at: DateTime<Utc>,
        depth: i32,
    ) {
        let message = &send.message;
        self.workspace.push(send.scope.workspace_id());
        self.agent.push(recipient.agent_id);
        self.source.push(message.id);
        self.day.push(day_of(message.created_at));
        self.channel.push(message.channel_id);
        self.node.push(agent.node_id.as_str());
        self.mode.push(recipient.mode);
        self.reason.push(recipient.reason);
        self.created_at.push(message.created_at);
        self.expires_at.push(expires_at);
        self.depth.push(depth);
    }
}

/// One row per message, as columns.
#[derive(Default)]
pub(crate) struct MessageColumns<'a> {
    workspace: Vec<WorkspaceId>,
    id: Vec<MessageId>,
    day: Vec<NaiveDate>,
    channel: Vec<ChannelId>,
    agent: Vec<AgentId>,
    agent_name: Vec<&'a str>,
    agent_type: Vec<&'static str>,
    thread: Vec<Option<MessageId>>,
    text: Vec<&'a str>,
    blocks: Vec<Option<&'a str>>,
    metadata: Vec<&'a str>,
    attachments: Vec<String>,
    mentions: Vec<String>,
    mode: Vec<&'static str>,
    content_type: Vec<Option<&'a str>>,
    created_at: Vec<DateTime<Utc>>,
    traceparent: Vec<Option<&'a str>>,
}

impl<'a> MessageColumns<'a> {
    pub(crate) fn push(&mut self, send: &'a NewSend) {
        let message = &send.message;
        self.workspace.push(send.scope.workspace_id());
        self.id.push(message.id);
        self.day.push(day_of(message.created_at));
        self.channel.push(message.channel_id);
        self.agent.push(message.agent_id);
        self.agent_name.push(&message.agent_name);
        self.agent_type.push(message.agent_kind.as_str());
        self.thread.push(message.thread_id);
        self.text.push(&message.text);
        self.blocks.push(message.blocks.as_ref().map(JsonText::get));
        self.metadata.push(message.metadata.get());
        self.attachments.push(message.attachments.to_string());
        // An array of arrays must be rectangular, so the names travel as one text; a name has no space.
        self.mentions.push(message.mentions.join(" "));
        self.mode.push(message.mode.as_str());
        self.content_type.push(message.content_type.as_deref());
        self.created_at.push(message.created_at);
        self.traceparent.push(send.traceparent.as_deref());
    }

    /// Binds the columns, in the order of `stored_rows`.
    pub(crate) fn bind<'q>(&'q self, query: BatchQuery<'q>) -> BatchQuery<'q> {
        query
            .bind(&self.workspace)
            .bind(&self.id)
            .bind(&self.day)
            .bind(&self.channel)
            .bind(&self.agent)
            .bind(&self.agent_name)
            .bind(&self.agent_type)
            .bind(&self.thread)
            .bind(&self.text)
            .bind(&self.blocks)
            .bind(&self.metadata)
            .bind(&self.attachments)
            .bind(&self.mentions)
            .bind(&self.mode)
            .bind(&self.content_type)
            .bind(&self.created_at)
            .bind(&self.traceparent)
    }
}

/// One row per attached file, as columns.
#[derive(Default)]
pub(crate) struct AttachmentColumns {
    workspace: Vec<WorkspaceId>,
    file: Vec<FileId>,
    message: Vec<MessageId>,
    day: Vec<NaiveDate>,
}

impl AttachmentColumns {
    pub(crate) fn push(&mut self, send: &NewSend) {
        let message = &send.message;
        for attachment in message.attachments.as_array().into_iter().flatten() {
            // The engine wrote them from rows of files.
            let Some(file) = attachment["file_id"].as_str().and_then(|id| id.parse().ok()) else { continue };
            self.workspace.push(send.scope.workspace_id());
            self.file.push(file);
            self.message.push(message.id);
            self.day.push(day_of(message.created_at));
        }
    }

    /// Binds the columns, in the order of `attached_rows`.
    pub(crate) fn bind<'q>(&'q self, query: BatchQuery<'q>) -> BatchQuery<'q> {
        query.bind(&self.workspace).bind(&self.file).bind(&self.message).bind(&self.day)
    }
}

/// Parameters of [`WRITE`].
#[derive(Default)]
struct BatchColumns<'a> {
    deliveries: DeliveryColumns<'a>,
    messages: MessageColumns<'a>,
    attachments: AttachmentColumns,
    /// Open request, recipient and facts of each delivery, in the order of the columns.
    places: Vec<(usize, usize, &'a AgentFacts)>,
}

impl<'a> BatchColumns<'a> {
    fn collect(sends: &'a [NewSend], open: &[usize], facts: &'a BatchFacts) -> Self {
        let mut columns = Self::default();
        for (nth, index) in open.iter().enumerate() {
            let send = &sends[*index];
            // Only current sends are open, whose workspace was read.
            let Some((ttl_seconds, depth)) = facts.workspace(send.scope) else { continue };
            columns.messages.push(send);
            columns.attachments.push(send);
            // The message is written here, its deliveries by chunks.
            if send.is_fanout() {
                continue;
            }
            let expires_at = send.expires_at(ttl_seconds);
            for (position, recipient) in send.recipients.iter().enumerate() {
                // A current send has all of its recipients among the facts.
                let Some(agent) = facts.agent(send.scope, recipient.agent_id) else { continue };
                columns.places.push((nth, position, agent));
                columns.deliveries.push(send, recipient, agent, expires_at, depth);
            }
        }
        columns
    }

    fn query(&self) -> BatchQuery<'_> {
        let d = &self.deliveries;
        let query = sqlx::query(WRITE)
            .bind(&d.workspace)
            .bind(&d.agent)
            .bind(&d.source)
            .bind(&d.day)
            .bind(&d.channel)
            .bind(&d.node)
            .bind(&d.mode)
            .bind(&d.reason)
            .bind(&d.created_at)
            .bind(&d.expires_at)
            .bind(&d.depth);
        self.attachments.bind(self.messages.bind(query))
    }
}

/// Writes the open requests. Returns, per request, one entry per recipient.
pub(crate) async fn write_rows(
    tx: &mut DatabaseSession,
    sends: &[NewSend],
    open: &[usize],
    facts: &BatchFacts,
) -> StoreResult<Vec<Vec<Option<WrittenDelivery>>>> {
    if open.is_empty() {
        return Ok(Vec::new());
    }
    let columns = BatchColumns::collect(sends, open, facts);
    let doing = "writing the batch";
    let rows = columns.query().fetch_all(tx).await.map_err(StoreError::from_sqlx(doing))?;
    let mut written: Vec<Vec<Option<WrittenDelivery>>> =
        open.iter().map(|index| vec![None; sends[*index].recipients.len()]).collect();
    for row in rows {
        // `ord` counts the columns' rows from 1; a delivery without a seq did not fit.
        let (ord, seq): (i64, Option<Seq>) = FromRow::from_row(&row).map_err(StoreError::from_sqlx(doing))?;
        let index = usize::try_from(ord - 1).unwrap_or(usize::MAX);
        let (Some((nth, position, agent)), Some(seq)) = (columns.places.get(index), seq) else { continue };
        written[*nth][*position] = Some(WrittenDelivery {
            seq,
            node_id: agent.node_id.clone(),
            provider: agent.provider.clone(),
            gateways: agent.gateways.clone(),
            expires_at: columns.deliveries.expires_at[index],
        });
    }
    Ok(written)
}
