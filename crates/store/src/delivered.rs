//! Events of single deliveries: where they belong, and those of a flush of acknowledgements.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, ChannelId, DeliveryId, WorkspaceId, WorkspaceScope, event, session::Seq};
use serde_json::json;
use sqlx::{PgConnection, Row, postgres::PgRow};

use crate::{StoreError, StoreResult, events::NewEvent};

/// Acknowledged deliveries of one flush that become events; what is acknowledged beyond shows in the rows.
const EVENTS_PER_FLUSH: i64 = 1000;
/// Delivery partitions older than this have been dropped: a bound for the planner, generous by a day.
const KEPT_DAYS: i64 = 9;

/// Where a delivered message was posted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The channel, or the one behind the conversation.
    pub channel_id: ChannelId,
    /// Its name.
    pub channel_name: String,
    /// What clients call the conversation; `None` for a channel.
    pub conversation_id: Option<String>,
}

impl Place {
    /// From the columns `channel_id`, `channel_name` and `conversation_id` of an outer join.
    pub(crate) fn from_row(row: &PgRow) -> Option<Self> {
        Some(Self {
            channel_id: ChannelId::new(row.get::<Option<i64>, _>("channel_id")?),
            channel_name: row.get::<Option<String>, _>("channel_name")?,
            conversation_id: row.get("conversation_id"),
        })
    }

    /// The event at this place, if there is one: observers see it as they see the message.
    #[must_use]
    pub fn of(this: Option<&Self>, event: NewEvent) -> NewEvent {
        match this {
            None => event,
            Some(Self { conversation_id: Some(id), .. }) => event.in_conversation(Some(id.clone())),
            Some(Self { channel_id, channel_name, .. }) => event.in_channel(*channel_id, channel_name.clone()),
        }
    }
}

/// A delivery was acknowledged by its recipient.
#[must_use]
pub fn delivered_event(id: DeliveryId, place: Option<&Place>) -> NewEvent {
    let data = json!({
        "delivery_id": id.to_string(),
        "message_id": id.source.to_string(),
        "agent_id": id.agent.to_string(),
    });
    Place::of(place, NewEvent::new(event::DELIVERY_DELIVERED, data).by(id.agent))
}

/// A mailbox whose ack floor has moved.
#[derive(Debug)]
pub(crate) struct Acked {
    pub(crate) scope: WorkspaceScope,
    pub(crate) agent_id: AgentId,
    /// From behind this.
    pub(crate) from: Seq,
    /// To this.
    pub(crate) to: Seq,
}

// What was acknowledged by REST before has had its event, and a dead letter stays one.
const NEWLY_ACKED: &str = "
SELECT d.workspace_id, d.agent_id, d.source_id, d.redrive_no,
       c.channel_id, c.name AS channel_name, c.conversation_id
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, above, upto)
 CROSS JOIN LATERAL (
       SELECT * FROM deliveries d
        WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id
          AND d.seq > k.above AND d.seq <= k.upto AND d.created_on >= $5
          AND NOT EXISTS (SELECT FROM delivery_exceptions e
                           WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                             AND e.seq = d.seq AND e.state IN (1, 4))
        ORDER BY d.seq LIMIT $6) AS d
  LEFT JOIN channels c ON c.workspace_id = d.workspace_id AND c.channel_id = d.channel_id
 ORDER BY d.workspace_id, d.agent_id, d.seq LIMIT $6";

/// The events of deliveries that became acknowledged, by mailbox and seq, 1000 at most.
pub(crate) async fn delivered_events(
    tx: &mut PgConnection,
    acked: &[Acked],
    at: DateTime<Utc>,
) -> StoreResult<Vec<(WorkspaceScope, NewEvent)>> {
    if acked.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query(NEWLY_ACKED)
        .bind(acked.iter().map(|a| a.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.agent_id.get()).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.from).collect::<Vec<_>>())
        .bind(acked.iter().map(|a| a.to).collect::<Vec<_>>())
        .bind((at - TimeDelta::days(KEPT_DAYS)).date_naive())
        .bind(EVENTS_PER_FLUSH)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading which deliveries were acknowledged"))?;
    let event = |row: &PgRow| {
        let id = DeliveryId {
            source: row.get("source_id"),
            agent: AgentId::new(row.get("agent_id")),
            redrive_no: row.get("redrive_no"),
        };
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id")));
        (scope, delivered_event(id, Place::from_row(row).as_ref()))
    };
    Ok(rows.iter().map(event).collect())
}
