//! Events of single deliveries: their location, and `delivery.delivered` for newly acknowledged rows.

use chrono::{DateTime, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, ChannelId, DeliveryId, WorkspaceScope,
    events::kind,
    mailboxes::{MessageLocation, stream::Seq},
};
use relay_wire::{events::recorded_data::DeliveryDelivered, field::ToValue as _};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    StoreError, StoreResult,
    codes::{ACKED, DEAD_LETTERED},
    connections::DatabaseSession,
    decode::decode_rows,
    events::Event,
};

/// Acknowledged deliveries of one flush that become events. The bound keeps the transaction short; the rows still show
/// the others as acknowledged.
const EVENTS_PER_FLUSH: i64 = 1000;
/// Days after which delivery partitions are dropped, plus one: lets the planner skip older partitions.
const KEPT_DAYS: i64 = 9;

/// Reads the columns `channel_id`, `channel_name` and `conversation_id` of an outer join.
pub(crate) fn message_location(row: &PgRow) -> sqlx::Result<Option<MessageLocation>> {
    let channel: (Option<ChannelId>, Option<String>) = (row.try_get("channel_id")?, row.try_get("channel_name")?);
    let (Some(channel_id), Some(channel_name)) = channel else { return Ok(None) };
    Ok(Some(MessageLocation { channel_id, channel_name, conversation_id: row.try_get("conversation_id")? }))
}

/// Delivery with the location of its message, as joined statements return it.
pub(crate) struct LocatedDelivery {
    pub(crate) scope: WorkspaceScope,
    pub(crate) delivery_id: DeliveryId,
    /// `None` if the delivery has no channel.
    pub(crate) place: Option<MessageLocation>,
}

impl FromRow<'_, PgRow> for LocatedDelivery {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            delivery_id: DeliveryId {
                source: row.try_get("source_id")?,
                agent: row.try_get("agent_id")?,
                redrive_no: row.try_get("redrive_no")?,
            },
            place: message_location(row)?,
        })
    }
}

/// Builds the `delivery.delivered` event of an acknowledged delivery.
#[must_use]
pub fn delivered_event(id: DeliveryId, place: Option<&MessageLocation>) -> Event {
    let data = DeliveryDelivered { delivery_id: id, message_id: id.source.message_id(), agent_id: id.agent };
    MessageLocation::attach(place, Event::new(kind::DELIVERY_DELIVERED, data.to_value()).by_agent(id.agent))
}

/// Move of one mailbox's ack floor.
#[derive(Debug)]
pub(crate) struct AckedRange {
    pub(crate) scope: WorkspaceScope,
    pub(crate) agent_id: AgentId,
    /// Exclusive.
    pub(crate) from: Seq,
    /// Inclusive.
    pub(crate) to: Seq,
}

// A row acknowledged over REST already has its event, and a dead letter stays one.
// The inner limit keeps a long backlog of one mailbox from being read, the outer one bounds all of them.
const NEWLY_ACKED: &str = formatcp!(
    "
SELECT d.workspace_id, d.agent_id, d.source_id, d.redrive_no,
       c.channel_id, c.name AS channel_name, c.conversation_id
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, above, upto)
 CROSS JOIN LATERAL (
       SELECT * FROM deliveries d
        WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id
          AND d.seq > k.above AND d.seq <= k.upto AND d.created_on >= $5
          AND NOT EXISTS (SELECT FROM delivery_exceptions e
                           WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                             AND e.seq = d.seq AND e.state IN ({ACKED}, {DEAD_LETTERED}))
        ORDER BY d.seq LIMIT $6) AS d
  LEFT JOIN channels c ON c.workspace_id = d.workspace_id AND c.channel_id = d.channel_id
 ORDER BY d.workspace_id, d.agent_id, d.seq LIMIT $6"
);

/// Builds the events of newly acknowledged deliveries by mailbox and seq, at most [`EVENTS_PER_FLUSH`].
pub(crate) async fn delivered_events(
    tx: &mut DatabaseSession,
    acked: &[AckedRange],
    at: DateTime<Utc>,
) -> StoreResult<Vec<(WorkspaceScope, Event)>> {
    if acked.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query(NEWLY_ACKED)
        .bind(acked.iter().map(|a| a.scope.workspace_id()).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.agent_id).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.from).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.to).collect::<Vec<_>>())
        .bind((at - TimeDelta::days(KEPT_DAYS)).date_naive())
        .bind(EVENTS_PER_FLUSH)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading newly acknowledged deliveries"))?;
    let delivered: Vec<LocatedDelivery> = decode_rows("deliveries", &rows)?;
    Ok(delivered.into_iter().map(|it| (it.scope, delivered_event(it.delivery_id, it.place.as_ref()))).collect())
}
