//! The one statement that writes a batch's messages and deliveries, and its reading back.

use chrono::{DateTime, Duration, NaiveDate, Utc};
use relay_domain::{NodeId, ProviderName};
use sqlx::{PgConnection, Row};

use crate::{
    StoreError, StoreResult,
    commit::{Batch, Facts, NewSend, SendOutcome, Written, day_of},
    skipped::count_settled_above,
};

/// Heads are locked in (workspace, agent) order, each mailbox's rows are ranked under that lock, and
/// the first that fit under the depth cap get the next numbers. A mailbox's depth is what lies between
/// its settled floor and its head, less what is settled apart in between (counted only when it looks
/// full).
const WRITE: &str = concat!(
    "
WITH want AS (
    SELECT *
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::date[], $5::bigint[], $6::text[],
                  $7::smallint[], $8::smallint[], $9::timestamptz[], $10::timestamptz[], $11::int[])
           WITH ORDINALITY AS w (workspace_id, agent_id, source_id, created_on, channel_id, node_id,
                                 mode, reason, created_at, expires_at, depth, ord)
), locked AS MATERIALIZED (
    SELECT h.workspace_id, h.agent_id, h.next_seq
      FROM mailbox_heads h
      JOIN (SELECT DISTINCT workspace_id, agent_id FROM want) AS k USING (workspace_id, agent_id)
     ORDER BY h.workspace_id, h.agent_id
       FOR UPDATE OF h
), ranked AS (
    SELECT w.*, l.next_seq,
           row_number() OVER (PARTITION BY w.workspace_id, w.agent_id ORDER BY w.ord) AS rank
      FROM want w
      JOIN locked l USING (workspace_id, agent_id)
), fitted AS MATERIALIZED (
    SELECT r.*,
           CASE WHEN r.next_seq - 1 - c.settled_floor + r.rank <= r.depth THEN true
                ELSE r.next_seq - 1 - c.settled_floor + r.rank <= r.depth
                     + ",
    count_settled_above!("c", "c.settled_floor"),
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
), delivered AS (
    INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, channel_id, node_id,
                            mode, reason, created_at, expires_at)
    SELECT workspace_id, agent_id, next_seq + rank - 1, created_on, source_id, channel_id, node_id,
           mode, reason, created_at, expires_at
      FROM fitted WHERE fits
), stored AS (
    INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name,
                          agent_type, thread_id, text, blocks, metadata, attachments, mentions, mode,
                          content_type, created_at, traceparent)
    SELECT w, m, d, c, a, n, t, h, x, b::json, e::json, f::json, string_to_array(p, ' '), o, y, z, q
      FROM unnest($12::bigint[], $13::bigint[], $14::date[], $15::bigint[], $16::bigint[], $17::text[],
                  $18::text[], $19::bigint[], $20::text[], $21::text[], $22::text[], $23::text[],
                  $24::text[], $25::text[], $26::text[], $27::timestamptz[], $28::text[])
           AS s (w, m, d, c, a, n, t, h, x, b, e, f, p, o, y, z, q)
)
SELECT ord, CASE WHEN fits THEN next_seq + rank - 1 END AS seq FROM fitted"
);

/// One row per delivery, as columns.
#[derive(Default)]
struct Deliveries<'a> {
    workspace: Vec<i64>,
    agent: Vec<i64>,
    source: Vec<i64>,
    day: Vec<NaiveDate>,
    channel: Vec<i64>,
    node: Vec<&'a str>,
    mode: Vec<i16>,
    reason: Vec<i16>,
    created_at: Vec<DateTime<Utc>>,
    expires_at: Vec<DateTime<Utc>>,
    depth: Vec<i32>,
}

/// One row per message, as columns.
#[derive(Default)]
struct Messages<'a> {
    workspace: Vec<i64>,
    id: Vec<i64>,
    day: Vec<NaiveDate>,
    channel: Vec<i64>,
    agent: Vec<i64>,
    agent_name: Vec<&'a str>,
    agent_type: Vec<&'a str>,
    thread: Vec<Option<i64>>,
    text: Vec<&'a str>,
    blocks: Vec<Option<String>>,
    metadata: Vec<String>,
    attachments: Vec<String>,
    mentions: Vec<String>,
    mode: Vec<&'a str>,
    content_type: Vec<Option<&'a str>>,
    created_at: Vec<DateTime<Utc>>,
    traceparent: Vec<Option<&'a str>>,
}

impl<'a> Messages<'a> {
    fn push(&mut self, send: &'a NewSend) {
        let message = &send.message;
        self.workspace.push(send.scope.workspace_id().get());
        self.id.push(message.message_id);
        self.day.push(day_of(message.created_at));
        self.channel.push(message.channel_id);
        self.agent.push(message.agent_id);
        self.agent_name.push(&message.agent_name);
        self.agent_type.push(&message.agent_type);
        self.thread.push(message.thread_id);
        self.text.push(&message.text);
        self.blocks.push(message.blocks.as_ref().map(ToString::to_string));
        self.metadata.push(message.metadata.to_string());
        self.attachments.push(message.attachments.to_string());
        self.mentions.push(message.mentions.join(" "));
        self.mode.push(&message.mode);
        self.content_type.push(message.content_type.as_deref());
        self.created_at.push(message.created_at);
        self.traceparent.push(send.traceparent.as_deref());
    }
}

/// Writes the open requests. Per request, one entry per recipient.
pub(crate) async fn write(
    tx: &mut PgConnection,
    sends: &[NewSend],
    open: &[usize],
    facts: &Facts,
) -> StoreResult<Vec<Vec<Option<Written>>>> {
    if open.is_empty() {
        return Ok(Vec::new());
    }
    let (mut d, mut m) = (Deliveries::default(), Messages::default());
    let mut written: Vec<Vec<Option<Written>>> = Vec::with_capacity(open.len());
    // Where each delivery's outcome belongs.
    let mut place: Vec<(usize, usize)> = Vec::new();
    for (nth, index) in open.iter().enumerate() {
        let send = &sends[*index];
        let (ttl_seconds, depth) = facts.workspace(send.scope);
        let ttl = send.ttl_ms.map_or_else(|| Duration::seconds(ttl_seconds.into()), Duration::milliseconds);
        let expires_at = send.message.created_at + ttl;
        m.push(send);
        written.push(vec![None; send.recipients.len()]);
        for (position, recipient) in send.recipients.iter().enumerate() {
            let Some(agent) = facts.agent(send.scope, recipient.agent_id) else { continue };
            place.push((nth, position));
            d.workspace.push(send.scope.workspace_id().get());
            d.agent.push(recipient.agent_id.get());
            d.source.push(send.message.message_id);
            d.day.push(day_of(send.message.created_at));
            d.channel.push(send.message.channel_id);
            d.node.push(agent.node_id.as_str());
            d.mode.push(recipient.mode);
            d.reason.push(recipient.reason);
            d.created_at.push(send.message.created_at);
            d.expires_at.push(expires_at);
            d.depth.push(depth);
        }
    }
    let rows = sqlx::query(WRITE)
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
        .bind(&d.depth)
        .bind(&m.workspace)
        .bind(&m.id)
        .bind(&m.day)
        .bind(&m.channel)
        .bind(&m.agent)
        .bind(&m.agent_name)
        .bind(&m.agent_type)
        .bind(&m.thread)
        .bind(&m.text)
        .bind(&m.blocks)
        .bind(&m.metadata)
        .bind(&m.attachments)
        .bind(&m.mentions)
        .bind(&m.mode)
        .bind(&m.content_type)
        .bind(&m.created_at)
        .bind(&m.traceparent)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("writing the batch"))?;
    for row in rows {
        let ord = usize::try_from(row.get::<i64, _>("ord") - 1).unwrap_or(usize::MAX);
        let (Some((nth, position)), Some(seq)) = (place.get(ord), row.get("seq")) else { continue };
        let send = &sends[open[*nth]];
        let Some(agent) = facts.agent(send.scope, send.recipients[*position].agent_id) else { continue };
        written[*nth][*position] = Some(Written {
            seq,
            node_id: agent.node_id.clone(),
            provider: agent.provider.clone(),
            expires_at: d.expires_at[ord],
        });
    }
    Ok(written)
}

/// What an earlier submission of this batch committed.
///
/// A request without its message there was not written by it: it is `Moved`, so that it is resolved
/// again (and, if it carries a key, finds the first answer).
pub(crate) async fn read_back(tx: &mut PgConnection, batch: &Batch) -> StoreResult<Vec<SendOutcome>> {
    let mut outcomes = Vec::with_capacity(batch.sends.len());
    for send in &batch.sends {
        let workspace = send.scope.workspace_id().get();
        let found: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM messages
              WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3)",
        )
        .bind(workspace)
        .bind(send.message.message_id)
        .bind(day_of(send.message.created_at))
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("reading back a message"))?;
        if !found {
            outcomes.push(SendOutcome::Moved);
            continue;
        }
        let rows: Vec<(i64, i64, String, Option<String>, DateTime<Utc>)> = sqlx::query_as(
            "SELECT d.agent_id, d.seq, d.node_id, a.provider, d.expires_at
               FROM deliveries d JOIN agents a USING (workspace_id, agent_id)
              WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.created_on = $3
                AND d.source_kind = 0 AND d.redrive_no = 0",
        )
        .bind(workspace)
        .bind(send.message.message_id)
        .bind(day_of(send.message.created_at))
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("reading back deliveries"))?;
        let deliveries = send.recipients.iter().map(|recipient| {
            rows.iter().find(|row| row.0 == recipient.agent_id.get()).map(|row| Written {
                seq: row.1,
                node_id: NodeId::new(&row.2),
                provider: row.3.as_deref().map(ProviderName::new),
                expires_at: row.4,
            })
        });
        outcomes.push(SendOutcome::Committed(deliveries.collect()));
    }
    Ok(outcomes)
}
