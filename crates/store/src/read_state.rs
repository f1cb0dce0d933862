//! Who has read what: explicit reads, and those that follow from a mailbox's ack floor.
//!
//! An acknowledged delivery is a read, unless it had expired. The worker folds acknowledged deliveries into
//! the last-read pointers of members within seconds (`read_fold`); what it has not come to yet is looked at
//! here, so that answers are exact.

use chrono::{DateTime, Utc};
use relay_domain::{ChannelId, MessageId, WorkspaceScope, names, observer::ObserverFilters};

use crate::{Store, StoreError, StoreResult, filters, messages_read::day_of};

/// Deliveries of one mailbox between its folded mark and its ack floor that an answer looks at.
///
/// The worker folds 2000 a second and more, so only a mailbox that was acknowledged faster than that, or
/// while no worker ran, can have more.
macro_rules! acked_in_channels {
    ($agent:literal) => {
        concat!(
            "SELECT f.channel_id, max(f.source_id) AS read_id, max(f.seq) AS seq
               FROM (SELECT d.* FROM mailbox_cursors k
                       LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
                      CROSS JOIN LATERAL (
                            SELECT * FROM deliveries
                             WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id
                               AND seq > coalesce(r.folded_seq, 0) AND seq <= k.ack_floor
                               AND source_kind = 0 AND channel_id IS NOT NULL
                             ORDER BY seq DESC LIMIT 5000) AS d
                      WHERE k.workspace_id = $1 AND k.agent_id = ",
            $agent,
            ") AS f
              WHERE NOT EXISTS (SELECT FROM delivery_exceptions x
                                 WHERE x.workspace_id = f.workspace_id AND x.agent_id = f.agent_id
                                   AND x.seq = f.seq AND x.state = 4)
              GROUP BY f.channel_id"
        )
    };
}
pub(crate) use acked_in_channels;

/// Readers that are counted of one message, and rows of each kind that the count looks at.
pub const MAX_COUNTED_READERS: i64 = 1000;

/// Somebody who has read a message.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReaderRow {
    /// Who.
    pub agent_id: i64,
    /// Its name.
    pub agent_name: String,
    /// When it first did.
    pub read_at: DateTime<Utc>,
}

/// How far a member has read a channel.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReadPosition {
    /// The member's name.
    pub agent_name: String,
    /// The newest message that it has read.
    pub last_read_id: Option<i64>,
    /// When it did.
    pub last_read_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Who has read a message, each once, in the order of reading; at most [`names::MAX_LISTED_MEMBERS`].
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn readers(&self, scope: WorkspaceScope, message: MessageId) -> StoreResult<Vec<ReaderRow>> {
        sqlx::query_as(
            "SELECT r.agent_id, a.name AS agent_name, min(r.read_at) AS read_at
               FROM (SELECT agent_id, read_at FROM message_reads
                      WHERE workspace_id = $1 AND message_id = $2
                     UNION ALL
                     SELECT d.agent_id,
                            coalesce((SELECT l.acked_at FROM ack_log l
                                       WHERE l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id
                                         AND l.acked_at >= d.created_at - interval '1 second'
                                         AND l.created_on >= d.created_on - 1 AND l.ack_floor >= d.seq
                                       ORDER BY l.acked_at LIMIT 1), d.created_at)
                       FROM deliveries d
                       JOIN mailbox_cursors k ON k.workspace_id = d.workspace_id AND k.agent_id = d.agent_id
                      WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.created_on >= $3 AND d.source_kind = 0
                        AND d.seq <= k.ack_floor
                        AND NOT EXISTS (SELECT FROM delivery_exceptions x
                                         WHERE x.workspace_id = $1 AND x.agent_id = d.agent_id AND x.seq = d.seq
                                           AND x.state = 4)) AS r
               JOIN agents a ON a.workspace_id = $1 AND a.agent_id = r.agent_id
              GROUP BY r.agent_id, a.name
              ORDER BY min(r.read_at), r.agent_id LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(day_of(message.get()))
        .bind(names::MAX_LISTED_MEMBERS)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the readers of a message"))
    }

    /// How far each member that the filters show has read a channel, in the order of joining; at most
    /// [`names::MAX_LISTED_MEMBERS`].
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn read_status(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ReadPosition>> {
        sqlx::query_as(
            "SELECT a.name AS agent_name, greatest(cm.last_read_id, acked.read_id) AS last_read_id,
                    CASE WHEN acked.read_id > coalesce(cm.last_read_id, -1) THEN
                         (SELECT l.acked_at FROM ack_log l
                           WHERE l.workspace_id = $1 AND l.agent_id = cm.agent_id AND l.ack_floor >= acked.seq
                             AND l.acked_at >= acked.created_at - interval '1 second'
                             AND l.created_on >= acked.created_on - 1
                           ORDER BY l.acked_at LIMIT 1)
                         ELSE cm.last_read_at END AS last_read_at
               FROM channel_members cm
               JOIN agents a ON a.workspace_id = cm.workspace_id AND a.agent_id = cm.agent_id AND a.deleted_at IS NULL
               LEFT JOIN mailbox_cursors k ON k.workspace_id = cm.workspace_id AND k.agent_id = cm.agent_id
               LEFT JOIN mailbox_reads r ON r.workspace_id = cm.workspace_id AND r.agent_id = cm.agent_id
               LEFT JOIN LATERAL (
                    SELECT d.source_id AS read_id, d.seq, d.created_at, d.created_on
                      FROM (SELECT * FROM deliveries
                             WHERE workspace_id = $1 AND agent_id = cm.agent_id
                               AND seq > coalesce(r.folded_seq, 0) AND seq <= k.ack_floor AND source_kind = 0
                             ORDER BY seq DESC LIMIT 5000) AS d
                     WHERE d.channel_id = $2
                       AND NOT EXISTS (SELECT FROM delivery_exceptions x
                                        WHERE x.workspace_id = $1 AND x.agent_id = cm.agent_id AND x.seq = d.seq
                                          AND x.state = 4)
                     ORDER BY d.source_id DESC LIMIT 1) AS acked ON true
              WHERE cm.workspace_id = $1 AND cm.channel_id = $2 AND ($4::bigint[] IS NULL OR cm.agent_id = ANY ($4))
              ORDER BY cm.joined_at, cm.agent_id LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(names::MAX_LISTED_MEMBERS)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading how far members have read a channel"))
    }
}
