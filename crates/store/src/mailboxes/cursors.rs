//! Positions of mailboxes, and batched moves of their cursors.
//!
//! Cursor rows are written only here and by expiry, settlement, claim and recovery statements. Transactions that lock
//! several of them do so in (workspace, agent) order, so that they cannot deadlock.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq};
use sqlx::{FromRow, Row as _};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
    events::{self, RecordedEvents},
    mailboxes::{
        delivery_events::{AckedRange, delivered_events},
        settled_floors::settled_above,
    },
    nodes::assignment::hosts_unassigned,
    statement_timeout::{STATEMENT_TIMEOUT, StatementTimeout as _},
};

/// Head and cursor of one mailbox, with its agent's location.
#[derive(Debug, Clone, FromRow)]
pub struct MailboxPosition {
    #[sqlx(rename = "workspace_id")]
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    #[sqlx(rename = "name")]
    pub agent_name: String,
    pub node_id: NodeId,
    /// `None` if the agent is unassigned: any provider of the node may serve it.
    pub provider: Option<ProviderName>,
    /// Seq of the next delivery.
    pub next_seq: Seq,
    /// Highest seq recorded as written to a socket.
    pub sent_seq: Seq,
    /// Highest seq acknowledged over a socket; all below are acknowledged too.
    pub ack_floor: Seq,
    /// Every seq up to this one is settled, by whatever means.
    pub settled_floor: Seq,
}

#[derive(Debug, Clone)]
pub struct LocatedAgent {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    /// `None` if the agent is unassigned.
    pub provider: Option<ProviderName>,
    pub agent_id: AgentId,
}

/// Progress of one mailbox on a gateway since its last flush.
#[derive(Debug, Clone)]
pub struct CursorMove {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    /// Node of the reporting connection. An ack is fenced by the agent's location.
    pub node_id: NodeId,
    /// Provider of the reporting connection.
    pub provider: ProviderName,
    /// Highest seq written to the socket; 0 if unchanged.
    pub sent_seq: Seq,
    /// Highest seq acknowledged; 0 if unchanged.
    pub acked_seq: Seq,
    /// Recovery epoch under which the connection was opened. Its seqs say nothing about a mailbox after another
    /// recovery.
    pub epoch: Option<i64>,
}

/// Result of a cursor flush.
#[derive(Debug, Default)]
pub struct CursorFlush {
    /// Newly acknowledged deliveries.
    pub acked: i64,
    /// Their events, in observed workspaces only.
    pub recorded: Vec<RecordedEvents>,
    /// Mailboxes whose moves were not written, because another transaction held their cursor.
    pub skipped: Vec<(WorkspaceScope, AgentId)>,
}

/// Treatment of a cursor that another transaction holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockedCursors {
    /// Skips its move, so that it delays no other mailbox.
    Skip,
    /// Waits up to the lock timeout: the caller relies on the moves.
    Wait,
}

const POSITION_COLUMNS: &str = "a.workspace_id, a.agent_id, a.name, a.node_id, a.provider,
    h.next_seq, c.sent_seq, c.ack_floor, c.settled_floor";

// `OFFSET 0` keeps the order of the names, which an index has, out of the choice of the index.
const POSITIONS_OF_PROVIDERS: &str = const_format::concatcp!(
    "SELECT k.place, ",
    POSITION_COLUMNS,
    "
  FROM unnest($1::bigint[], $2::text[], $3::text[]) WITH ORDINALITY AS k (workspace_id, node_id, provider, place)
 CROSS JOIN LATERAL (SELECT * FROM agents
                      WHERE workspace_id = k.workspace_id AND node_id = k.node_id AND deleted_at IS NULL OFFSET 0) AS a
  JOIN mailbox_heads h ON h.workspace_id = a.workspace_id AND h.agent_id = a.agent_id
  JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
 WHERE a.provider = k.provider OR a.provider IS NULL AND ",
    hosts_unassigned!("k.workspace_id", "k.node_id", "k.provider"),
    "
 ORDER BY k.place, a.name"
);

/// SQL that moves cursors. The ack floor moves only while the agent is still at the node and provider that
/// acknowledged. The settled floor follows it and continues over rows above that are settled individually.
///
/// No floor is raised above the head, whatever a client acknowledges. A stale snapshot of the head cannot lower an ack:
/// an acknowledged delivery was committed before the statement began.
///
/// `locked` sorts before it locks, so that concurrent flushes take the row locks in one order. `moved` and `logged`
/// see the values that `locked` read, because all parts of a statement share one snapshot.
///
/// `$locked` is appended to the lock. `skipped` has the moves that it kept from being written; those of another
/// location are not among them.
macro_rules! flush {
    ($moves:expr, $locked:literal, $answer:expr) => {
        const_format::concatcp!(
            "
WITH moves AS (
    SELECT m.*, ",
            $moves,
            "
), locked AS MATERIALIZED (
    SELECT c.workspace_id, c.agent_id, c.ack_floor, c.settled_floor,
           least(m.sent, h.next_seq - 1) AS sent, least(m.acked, h.next_seq - 1) AS acked
      FROM moves m
      JOIN mailbox_heads h ON h.workspace_id = m.workspace_id AND h.agent_id = m.agent_id
      JOIN agents a ON a.workspace_id = m.workspace_id AND a.agent_id = m.agent_id
                   AND a.node_id = m.node_id AND (a.provider IS NULL OR a.provider = m.provider)
      JOIN mailbox_cursors c ON c.workspace_id = m.workspace_id AND c.agent_id = m.agent_id
     WHERE m.now
     ORDER BY c.workspace_id, c.agent_id
       FOR UPDATE OF c ",
            $locked,
            "
), skipped AS (
    SELECT m.workspace_id, m.agent_id
      FROM moves m
      JOIN agents a ON a.workspace_id = m.workspace_id AND a.agent_id = m.agent_id
                   AND a.node_id = m.node_id AND (a.provider IS NULL OR a.provider = m.provider)
      JOIN mailbox_heads h ON h.workspace_id = m.workspace_id AND h.agent_id = m.agent_id
      JOIN mailbox_cursors c ON c.workspace_id = m.workspace_id AND c.agent_id = m.agent_id
     -- Nearly always all are locked, and nothing below is read. NOT IN is hashed, whatever the planner expects.
     WHERE m.now AND (SELECT count(*) FROM locked) < (SELECT count(*) FROM moves WHERE now)
       AND (m.workspace_id, m.agent_id) NOT IN (SELECT workspace_id, agent_id FROM locked)
), moved AS (
    UPDATE mailbox_cursors c
       SET sent_seq = greatest(c.sent_seq, l.sent),
           ack_floor = greatest(c.ack_floor, l.acked),
           settled_floor = (
               SELECT coalesce(max(x.last_seq) FILTER (WHERE x.last_seq = l.base + x.reach), l.base)
                 FROM (SELECT settled.last_seq, sum(settled.width) OVER (ORDER BY settled.last_seq) AS reach
                         FROM (",
            settled_above!("l", "l.base"),
            ") AS settled) AS x)
      FROM (SELECT *, greatest(settled_floor, acked) AS base FROM locked) AS l
     WHERE c.workspace_id = l.workspace_id AND c.agent_id = l.agent_id
), logged AS (
    INSERT INTO ack_log (workspace_id, agent_id, acked_at, created_on, ack_floor)
    SELECT workspace_id, agent_id, date_trunc('second', relay_now()), (relay_now() AT TIME ZONE 'UTC')::date, acked
      FROM locked WHERE acked > ack_floor
    ON CONFLICT (workspace_id, agent_id, acked_at, created_on)
    DO UPDATE SET ack_floor = greatest(ack_log.ack_floor, excluded.ack_floor)
)
",
            $answer
        )
    };
}

/// Moves the cursors of workspaces without observers in one statement, and returns the observed workspaces: their moves
/// also record events, which takes a transaction.
macro_rules! flush_unwatched {
    ($locked:literal) => {
        flush!(
            "coalesce(h.watched_until, '-infinity') <= relay_now() AS now
      FROM relay_require_epoch($7),
           unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
           AS m (workspace_id, agent_id, node_id, provider, sent, acked)
      LEFT JOIN event_heads h USING (workspace_id)",
            $locked,
            "SELECT coalesce(sum(acked - ack_floor) FILTER (WHERE acked > ack_floor), 0)::bigint,
            ARRAY(SELECT DISTINCT workspace_id FROM moves WHERE NOT now),
            ARRAY(SELECT workspace_id FROM skipped ORDER BY workspace_id, agent_id),
            ARRAY(SELECT agent_id FROM skipped ORDER BY workspace_id, agent_id) FROM locked"
        )
    };
}

/// Moves all cursors and returns the mailboxes whose ack floor rose, and, without floors, those that were skipped.
macro_rules! flush_watched {
    ($locked:literal) => {
        flush!(
            "true AS now
      FROM relay_require_epoch($7),
           unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
           AS m (workspace_id, agent_id, node_id, provider, sent, acked)",
            $locked,
            "SELECT workspace_id, agent_id, ack_floor, acked FROM locked WHERE acked > ack_floor
     UNION ALL SELECT workspace_id, agent_id, NULL, NULL FROM skipped"
        )
    };
}

impl LockedCursors {
    const fn flush(self) -> &'static str {
        match self {
            Self::Skip => flush_unwatched!("SKIP LOCKED"),
            Self::Wait => flush_unwatched!(""),
        }
    }

    const fn flush_watched(self) -> &'static str {
        match self {
            Self::Skip => flush_watched!("SKIP LOCKED"),
            Self::Wait => flush_watched!(""),
        }
    }
}

impl Store {
    /// Reads the positions of these mailboxes, except those of deleted agents.
    pub async fn positions(&self, mailboxes: &[(WorkspaceScope, AgentId)]) -> StoreResult<Vec<MailboxPosition>> {
        let (workspaces, agents) = split_keys(mailboxes);
        let query = format!(
            "SELECT {POSITION_COLUMNS}
               FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
               JOIN agents a USING (workspace_id, agent_id)
               JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE a.deleted_at IS NULL"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(workspaces)
            .bind(agents)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading mailbox positions"))?;
        decode_rows("agents", &rows)
    }

    /// Reads the positions of all agents on each of these providers, in name order. An unassigned agent counts as
    /// present on every provider of its node with the highest fitness.
    pub async fn positions_of_providers(
        &self,
        providers: &[(WorkspaceScope, NodeId, ProviderName)],
    ) -> StoreResult<Vec<Vec<MailboxPosition>>> {
        let doing = "reading mailbox positions of providers";
        let rows = sqlx::query(POSITIONS_OF_PROVIDERS)
            .bind(providers.iter().map(|(scope, ..)| scope.workspace_id()).collect::<Vec<WorkspaceId>>())
            .bind(providers.iter().map(|(_, node, _)| node.as_str()).collect::<Vec<&str>>())
            .bind(providers.iter().map(|(.., provider)| provider.as_str()).collect::<Vec<&str>>())
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut positions: Vec<Vec<MailboxPosition>> = providers.iter().map(|_| Vec::new()).collect();
        for row in &rows {
            let place: i64 = row.try_get("place").map_err(StoreError::from_sqlx(doing))?;
            if let Some(found) = usize::try_from(place - 1).ok().and_then(|index| positions.get_mut(index)) {
                found.push(decode_row("agents", row)?);
            }
        }
        Ok(positions)
    }

    /// Lists the agents located on these nodes.
    pub async fn agents_on_nodes(&self, keys: &[(WorkspaceScope, NodeId)]) -> StoreResult<Vec<LocatedAgent>> {
        let workspaces: Vec<WorkspaceId> = keys.iter().map(|(scope, _)| scope.workspace_id()).collect();
        let nodes: Vec<&str> = keys.iter().map(|(_, node)| node.as_str()).collect();
        let rows: Vec<(WorkspaceId, NodeId, Option<ProviderName>, AgentId)> = sqlx::query_as(
            "SELECT a.workspace_id, a.node_id, a.provider, a.agent_id
               FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)
               JOIN agents a USING (workspace_id, node_id)
              WHERE a.deleted_at IS NULL",
        )
        .bind(workspaces)
        .bind(nodes)
        .fetch_all(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("reading the agents on nodes"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, node_id, provider, agent_id)| LocatedAgent {
                scope: WorkspaceScope::from_engine_row(workspace),
                node_id,
                provider,
                agent_id,
            })
            .collect())
    }

    /// Records sent and acknowledged positions of many mailboxes; `moves` holds at most one entry per mailbox.
    ///
    /// Moves are monotonic, so a repeated one is harmless: after an error the caller keeps the moves and retries. The
    /// caller passes no moves of another epoch than the one that this process serves. An entry whose agent has left the
    /// node and provider named in it changes nothing. In observed workspaces the first 1000 newly acknowledged
    /// deliveries are recorded as events. The caller also keeps the moves of skipped mailboxes.
    pub async fn flush_cursors(
        &self,
        moves: &[CursorMove],
        locked: LockedCursors,
        at: DateTime<Utc>,
    ) -> StoreResult<CursorFlush> {
        let doing = "moving mailbox cursors";
        let epoch = self.epoch(doing)?;
        let moved = CursorColumns::from_moves(moves)
            .bind(sqlx::query_as(locked.flush()))
            .bind(epoch)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing));
        let (acked, watched, workspaces, agents): (i64, Vec<WorkspaceId>, Vec<WorkspaceId>, Vec<AgentId>) =
            self.note_epoch(epoch, moved)?;
        let skipped = workspaces.into_iter().map(WorkspaceScope::from_engine_row).zip(agents);
        let mut flushed = CursorFlush { acked, recorded: Vec::new(), skipped: skipped.collect() };
        // After an error here the caller repeats all moves. The ones above were written, and have no effect then.
        if !watched.is_empty() {
            let observed = moves.iter().filter(|m| watched.contains(&m.scope.workspace_id()));
            let work = self.flush_watched(observed, locked, epoch, at);
            // One bound for the whole transaction, because the acks of all other mailboxes wait behind it.
            let done = tokio::time::timeout(STATEMENT_TIMEOUT, work).await;
            let done = self.note_epoch(epoch, done.unwrap_or_else(|_| Err(StoreError::unavailable(doing))))?;
            flushed.acked += done.acked;
            flushed.recorded = done.recorded;
            flushed.skipped.extend(done.skipped);
        }
        Ok(flushed)
    }

    async fn flush_watched(
        &self,
        moves: impl Iterator<Item = &CursorMove> + Send,
        locked: LockedCursors,
        epoch: Option<i64>,
        at: DateTime<Utc>,
    ) -> StoreResult<CursorFlush> {
        let doing = "moving observed mailbox cursors";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows: Vec<(WorkspaceScope, AgentId, Option<Seq>, Option<Seq>)> = CursorColumns::from_moves(moves)
            .bind(sqlx::query_as(locked.flush_watched()))
            .bind(epoch)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let (mut acked, mut skipped) = (Vec::new(), Vec::new());
        for (scope, agent_id, from, to) in rows {
            match from.zip(to) {
                Some((from, to)) => acked.push(AckedRange { scope, agent_id, from, to }),
                None => skipped.push((scope, agent_id)),
            }
        }
        let events = delivered_events(&mut tx, &acked, at).await?;
        let recorded = events::append_mixed(&mut tx, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(CursorFlush { acked: acked.iter().map(|a| a.to - a.from).sum(), recorded, skipped })
    }
}

/// Columns of cursor moves for `unnest`.
#[derive(Default)]
struct CursorColumns<'a> {
    workspaces: Vec<WorkspaceId>,
    agents: Vec<AgentId>,
    nodes: Vec<&'a str>,
    providers: Vec<&'a str>,
    sent: Vec<Seq>,
    acked: Vec<Seq>,
}

type Query<'q, O> = sqlx::query::QueryAs<'q, sqlx::Postgres, O, sqlx::postgres::PgArguments>;

impl<'a> CursorColumns<'a> {
    fn from_moves(moves: impl IntoIterator<Item = &'a CursorMove>) -> Self {
        let mut columns = Self::default();
        for m in moves {
            columns.workspaces.push(m.scope.workspace_id());
            columns.agents.push(m.agent_id);
            columns.nodes.push(m.node_id.as_str());
            columns.providers.push(m.provider.as_str());
            columns.sent.push(m.sent_seq);
            columns.acked.push(m.acked_seq);
        }
        columns
    }

    fn bind<O>(self, query: Query<'a, O>) -> Query<'a, O> {
        query
            .bind(self.workspaces)
            .bind(self.agents)
            .bind(self.nodes)
            .bind(self.providers)
            .bind(self.sent)
            .bind(self.acked)
    }
}

/// Splits mailbox keys into two columns for `unnest`.
pub(crate) fn split_keys(keys: &[(WorkspaceScope, AgentId)]) -> (Vec<WorkspaceId>, Vec<AgentId>) {
    keys.iter().map(|(scope, agent)| (scope.workspace_id(), *agent)).unzip()
}
