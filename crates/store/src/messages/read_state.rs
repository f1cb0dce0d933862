//! Readers of messages and read positions of members: explicit reads, and reads implied by ack floors.
//!
//! An acked delivery is a read, unless it had expired. The worker folds acked deliveries into the last-read
//! pointers of members within seconds ([`crate::messages::read_folding`]). These queries also read the
//! deliveries that are not folded yet, so that their results are exact.

use const_format::formatcp;
use relay_domain::{
    ChannelId, MessageId, WorkspaceScope,
    messages::{ReadPosition, Reader},
    names,
    observers::ObserverFilters,
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    messages::days::{LAST_DAY, day_of_id},
    observers::filters,
};

/// SELECT of the newest acked message per channel among the deliveries of agent `$2` between its folded seq and its ack
/// floor.
///
/// It reads at most 5000 deliveries. The worker folds 2000 a second and more, so only a mailbox that was acked
/// faster than that, or while no worker ran, has more.
pub(crate) const ACKED_IN_CHANNELS: &str = formatcp!(
    "SELECT f.channel_id, max(f.source_id) AS read_id, max(f.seq) AS seq
       FROM (SELECT d.* FROM mailbox_cursors k
               LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
              CROSS JOIN LATERAL (
                    SELECT * FROM deliveries
                     WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id
                       AND seq > coalesce(r.folded_seq, 0) AND seq <= k.ack_floor AND created_on <= {LAST_DAY}
                       AND source_kind = {MESSAGE_SOURCE} AND channel_id IS NOT NULL
                     ORDER BY seq DESC LIMIT 5000) AS d
              WHERE k.workspace_id = $1 AND k.agent_id = $2) AS f
      WHERE NOT EXISTS (SELECT FROM delivery_exceptions x
                         WHERE x.workspace_id = f.workspace_id AND x.agent_id = f.agent_id
                           AND x.seq = f.seq AND x.state = {DEAD_LETTERED})
      GROUP BY f.channel_id"
);

/// Limit of the readers counted for one message, and of the rows of each kind that the count reads.
pub const MAX_COUNTED_READERS: i64 = 1000;

// Receipts, and acked deliveries that had not expired. The time of an ack is that of the first ack that covers the
// delivery; an agent that has both counts once, with the earlier time.
// An ack without a row in the log, as after a recovery that moved the floor, is dated by its delivery. The log has
// whole seconds: a row may be up to a second older than its delivery, and around midnight have the day before.
const READERS: &str = formatcp!(
    "
SELECT r.agent_id, a.name AS agent_name, min(r.read_at) AS read_at
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
         WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.created_on >= $3 AND d.source_kind = {MESSAGE_SOURCE}
           AND d.seq <= k.ack_floor
           AND NOT EXISTS (SELECT FROM delivery_exceptions x
                            WHERE x.workspace_id = $1 AND x.agent_id = d.agent_id AND x.seq = d.seq
                              AND x.state = {DEAD_LETTERED})) AS r
  JOIN agents a ON a.workspace_id = $1 AND a.agent_id = r.agent_id
 GROUP BY r.agent_id, a.name
 ORDER BY min(r.read_at), r.agent_id LIMIT $4"
);

// The last-read pointer, or a newer acked delivery that is not folded yet.
const POSITIONS: &str = formatcp!(
    "
SELECT a.name AS agent_name, greatest(cm.last_read_id, acked.read_id) AS last_read_id,
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
                  AND seq > coalesce(r.folded_seq, 0) AND seq <= k.ack_floor AND source_kind = {MESSAGE_SOURCE}
                ORDER BY seq DESC LIMIT 5000) AS d
        WHERE d.channel_id = $2
          AND NOT EXISTS (SELECT FROM delivery_exceptions x
                           WHERE x.workspace_id = $1 AND x.agent_id = cm.agent_id AND x.seq = d.seq
                             AND x.state = {DEAD_LETTERED})
        ORDER BY d.source_id DESC LIMIT 1) AS acked ON true
 WHERE cm.workspace_id = $1 AND cm.channel_id = $2 AND ($4::bigint[] IS NULL OR cm.agent_id = ANY ($4))
 ORDER BY cm.joined_at, cm.agent_id LIMIT $3"
);

impl Store {
    /// Lists the readers of a message in the order of reading, each once; at most [`names::MAX_LISTED_MEMBERS`].
    pub async fn readers(&self, scope: WorkspaceScope, message: MessageId) -> StoreResult<Vec<Reader>> {
        sqlx::query_as(READERS)
            .bind(scope.workspace_id())
            .bind(message)
            .bind(day_of_id(message.get()))
            .bind(names::MAX_LISTED_MEMBERS)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing the readers of a message"))
    }

    /// Lists the read positions of a channel's members that pass the filters, in the order of joining; at most
    /// [`names::MAX_LISTED_MEMBERS`].
    pub async fn read_status(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ReadPosition>> {
        sqlx::query_as(POSITIONS)
            .bind(scope.workspace_id())
            .bind(channel)
            .bind(names::MAX_LISTED_MEMBERS)
            .bind(filters::agent_ids(filters))
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing the read positions of a channel"))
    }
}
