//! Where mailboxes stand, and moving their floors.
//!
//! Cursor rows are written only here and by the expiry, REST settling and worker statements; always in
//! transactions of their own, locked in (workspace, agent) order (invariant 8).

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, session::Seq};
use sqlx::Row;

use crate::{
    Store, StoreError, StoreResult,
    delivered::{Acked, delivered_events},
    events::{self, Recorded},
    located::has_unclaimed,
    patience::{PATIENCE, Patient as _},
    skipped::settled_above,
};

/// A mailbox and where its agent is.
#[derive(Debug, Clone)]
pub struct Position {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Whose mailbox.
    pub agent_id: AgentId,
    /// The agent's name.
    pub agent_name: String,
    /// The agent's node.
    pub node_id: NodeId,
    /// The agent's provider; none: any of the node.
    pub provider: Option<ProviderName>,
    /// The seq that will be allotted next.
    pub next_seq: Seq,
    /// The highest seq known to have been written to a socket.
    pub sent_seq: Seq,
    /// Acknowledged over a socket up to here.
    pub ack_floor: Seq,
    /// Settled by any means up to here.
    pub settled_floor: Seq,
}

/// An agent's place.
#[derive(Debug, Clone)]
pub struct Located {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// The provider; none: any of the node.
    pub provider: Option<ProviderName>,
    /// The agent.
    pub agent_id: AgentId,
}

/// What a gateway learnt about one mailbox since it last wrote.
#[derive(Debug, Clone)]
pub struct CursorMove {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Whose mailbox.
    pub agent_id: AgentId,
    /// The node whose connection says so: the fence of an ack is the agent's location.
    pub node_id: NodeId,
    /// The provider whose connection says so.
    pub provider: ProviderName,
    /// Highest seq written to the socket; 0 when nothing new.
    pub sent_seq: Seq,
    /// Highest seq acknowledged; 0 when nothing new.
    pub acked_seq: Seq,
}

/// What a flush has changed.
#[derive(Debug, Default)]
pub struct Flushed {
    /// How many rows became acknowledged.
    pub acked: i64,
    /// The events of them, where somebody may be looking.
    pub recorded: Vec<Recorded>,
}

const POSITION_COLUMNS: &str = "a.workspace_id, a.agent_id, a.name, a.node_id, a.provider,
    h.next_seq, c.sent_seq, c.ack_floor, c.settled_floor";

/// The floor moves only while the agent is still at the node and provider that acknowledged. The
/// settled floor follows it, and runs on over what is settled apart.
macro_rules! flush {
    ($moves:literal, $answer:literal) => {
        concat!(
            "
WITH moves AS (
    SELECT m.*, ",
            $moves,
            "
), locked AS MATERIALIZED (
    SELECT c.workspace_id, c.agent_id, c.ack_floor, c.settled_floor, m.sent, m.acked
      FROM moves m
      JOIN agents a ON a.workspace_id = m.workspace_id AND a.agent_id = m.agent_id
                   AND a.node_id = m.node_id AND (a.provider IS NULL OR a.provider = m.provider)
      JOIN mailbox_cursors c ON c.workspace_id = m.workspace_id AND c.agent_id = m.agent_id
     WHERE m.now
     ORDER BY c.workspace_id, c.agent_id
       FOR UPDATE OF c
), moved AS (
    UPDATE mailbox_cursors c
       SET sent_seq = greatest(c.sent_seq, l.sent),
           ack_floor = greatest(c.ack_floor, l.acked),
           settled_floor = (
               SELECT coalesce(max(x.last_seq) FILTER (WHERE x.last_seq = l.base + x.reach), l.base)
                 FROM (SELECT apart.last_seq, sum(apart.width) OVER (ORDER BY apart.last_seq) AS reach
                         FROM (",
            settled_above!("l", "l.base"),
            ") AS apart) AS x)
      FROM (SELECT *, greatest(settled_floor, acked) AS base FROM locked) AS l
     WHERE c.workspace_id = l.workspace_id AND c.agent_id = l.agent_id
), logged AS (
    INSERT INTO ack_log (workspace_id, agent_id, acked_at, created_on, ack_floor)
    SELECT workspace_id, agent_id, date_trunc('second', now()), (now() AT TIME ZONE 'UTC')::date, acked
      FROM locked WHERE acked > ack_floor
    ON CONFLICT (workspace_id, agent_id, acked_at, created_on)
    DO UPDATE SET ack_floor = greatest(ack_log.ack_floor, excluded.ack_floor)
)
",
            $answer
        )
    };
}

/// Moves the cursors of workspaces that nobody observes, and tells which are observed: there a move makes
/// events, in a transaction of several statements.
const FLUSH: &str = flush!(
    "coalesce(h.watched_until, '-infinity') <= now() AS now
      FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
           AS m (workspace_id, agent_id, node_id, provider, sent, acked)
      LEFT JOIN event_heads h USING (workspace_id)",
    "SELECT coalesce(sum(acked - ack_floor) FILTER (WHERE acked > ack_floor), 0)::bigint,
            ARRAY(SELECT DISTINCT workspace_id FROM moves WHERE NOT now) FROM locked"
);

/// Moves all cursors, and tells which ack floors rose.
const FLUSH_WATCHED: &str = flush!(
    "true AS now
      FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
           AS m (workspace_id, agent_id, node_id, provider, sent, acked)",
    "SELECT workspace_id, agent_id, ack_floor, acked FROM locked WHERE acked > ack_floor"
);

impl Store {
    /// The positions of these mailboxes; those of deleted agents are left out.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn positions(&self, of: &[(WorkspaceScope, AgentId)]) -> StoreResult<Vec<Position>> {
        let (workspaces, agents) = split(of);
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
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("reading mailbox positions"))?;
        Ok(rows.iter().map(position).collect())
    }

    /// The positions of all agents located on a node's provider, in name order. Those of no particular provider are
    /// on all that are as fit to have them as any of the node.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn positions_of_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> StoreResult<Vec<Position>> {
        let query = format!(
            "SELECT {POSITION_COLUMNS}
               FROM agents a
               JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.deleted_at IS NULL
                AND (a.provider = $3 OR a.provider IS NULL AND {})
              ORDER BY a.name",
            has_unclaimed!()
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(scope.workspace_id().get())
            .bind(node.as_str())
            .bind(provider.as_str())
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("reading a provider's mailbox positions"))?;
        Ok(rows.iter().map(position).collect())
    }

    /// Which agents are located on these nodes, with the provider that they are bound to, if to one.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agents_on_nodes(&self, of: &[(WorkspaceScope, NodeId)]) -> StoreResult<Vec<Located>> {
        let workspaces: Vec<i64> = of.iter().map(|(scope, _)| scope.workspace_id().get()).collect();
        let nodes: Vec<&str> = of.iter().map(|(_, node)| node.as_str()).collect();
        let rows: Vec<(i64, String, Option<String>, i64)> = sqlx::query_as(
            "SELECT a.workspace_id, a.node_id, a.provider, a.agent_id
               FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)
               JOIN agents a USING (workspace_id, node_id)
              WHERE a.deleted_at IS NULL",
        )
        .bind(workspaces)
        .bind(nodes)
        .fetch_all(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("reading which agents are on nodes"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, node, provider, agent)| Located {
                scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
                node_id: NodeId::new(node),
                provider: provider.map(ProviderName::new),
                agent_id: AgentId::new(agent),
            })
            .collect())
    }

    /// Records what was sent and acknowledged, set-wise.
    ///
    /// At most one entry per mailbox. Moves are monotonic; an entry whose agent has moved away from
    /// the node and provider named in it changes nothing. In a workspace that somebody may be looking at,
    /// the first 1000 deliveries that became acknowledged are recorded as events.
    ///
    /// # Errors
    /// When Postgres is away or a statement lost a lock race; the caller keeps the moves.
    pub async fn flush_cursors(&self, moves: &[CursorMove], at: DateTime<Utc>) -> StoreResult<Flushed> {
        let (acked, watched): (i64, Vec<i64>) = Columns::of(moves)
            .bind(sqlx::query_as(FLUSH))
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("moving mailbox cursors"))?;
        let mut flushed = Flushed { acked, recorded: Vec::new() };
        if !watched.is_empty() {
            let observed = moves.iter().filter(|m| watched.contains(&m.scope.workspace_id().get()));
            let work = self.flush_watched(observed, at);
            let done = tokio::time::timeout(PATIENCE, work).await;
            let done = done.unwrap_or_else(|_| Err(StoreError::still_away("moving mailbox cursors")))?;
            flushed.acked += done.acked;
            flushed.recorded = done.recorded;
        }
        Ok(flushed)
    }

    async fn flush_watched(
        &self,
        moves: impl Iterator<Item = &CursorMove> + Send,
        at: DateTime<Utc>,
    ) -> StoreResult<Flushed> {
        let doing = "moving observed mailbox cursors";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows: Vec<(i64, i64, Seq, Seq)> = Columns::of(moves)
            .bind(sqlx::query_as(FLUSH_WATCHED))
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let acked: Vec<Acked> = rows
            .into_iter()
            .map(|(workspace, agent, from, to)| Acked {
                scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
                agent_id: AgentId::new(agent),
                from,
                to,
            })
            .collect();
        let events = delivered_events(&mut tx, &acked, at).await?;
        let recorded = events::append_mixed(&mut tx, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Flushed { acked: acked.iter().map(|a| a.to - a.from).sum(), recorded })
    }
}

/// Moves as columns for `unnest`.
#[derive(Default)]
struct Columns<'a> {
    workspaces: Vec<i64>,
    agents: Vec<i64>,
    nodes: Vec<&'a str>,
    providers: Vec<&'a str>,
    sent: Vec<Seq>,
    acked: Vec<Seq>,
}

type Query<'q, O> = sqlx::query::QueryAs<'q, sqlx::Postgres, O, sqlx::postgres::PgArguments>;

impl<'a> Columns<'a> {
    fn of(moves: impl IntoIterator<Item = &'a CursorMove>) -> Self {
        let mut columns = Self::default();
        for m in moves {
            columns.workspaces.push(m.scope.workspace_id().get());
            columns.agents.push(m.agent_id.get());
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

/// Two columns for `unnest`.
pub(crate) fn split(of: &[(WorkspaceScope, AgentId)]) -> (Vec<i64>, Vec<i64>) {
    of.iter().map(|(scope, agent)| (scope.workspace_id().get(), agent.get())).unzip()
}

fn position(row: &sqlx::postgres::PgRow) -> Position {
    Position {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
        agent_id: AgentId::new(row.get("agent_id")),
        agent_name: row.get("name"),
        node_id: NodeId::new(row.get::<String, _>("node_id")),
        provider: row.get::<Option<String>, _>("provider").map(ProviderName::new),
        next_seq: row.get("next_seq"),
        sent_seq: row.get("sent_seq"),
        ack_floor: row.get("ack_floor"),
        settled_floor: row.get("settled_floor"),
    }
}
