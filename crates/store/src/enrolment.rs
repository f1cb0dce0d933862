//! Enrolling nodes: by REST, and the implicit direct nodes of agents. Each time with a new token.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, WorkspaceScope, event,
    node::{DIRECT_NAME_PREFIX, NODE_TTL},
    plan::Ceiling,
    token::TokenHash,
};
use serde_json::{Value, json};
use sqlx::{PgTransaction, Row as _};

use crate::{
    Store, StoreError, StoreResult,
    ceilings::is_within,
    events::{self, NewEvent, Recorded},
    subscriptions::Sealed,
    tokens::read_hash,
};

/// What an enrolment says. Fields left out keep what is stored.
#[derive(Debug, Clone)]
pub struct NodeEnrolment {
    /// Chosen by the caller.
    pub node_id: Option<NodeId>,
    /// Used if the node is new and the caller chose none.
    pub fresh_id: NodeId,
    /// Its name.
    pub name: String,
    /// What it is recognised by without a node id.
    pub machine_id: Option<String>,
    /// `ws`, `http_push` or `poll`; a node that is there already keeps its own.
    pub kind: &'static str,
    /// How deliveries reach it.
    pub delivery_adapter: Option<&'static str>,
    /// How it is called, without and with its secrets.
    pub delivery: Option<NewDelivery>,
    /// `direct` or `broker`.
    pub role: Option<&'static str>,
    /// An array of objects.
    pub capabilities: Option<Value>,
    /// 0 for unlimited.
    pub max_agents: Option<i32>,
    /// Its tags.
    pub tags: Option<Vec<String>>,
    /// Free text.
    pub version: Option<String>,
    /// The new token.
    pub token_hash: TokenHash,
    /// How many nodes the workspace may have.
    pub ceiling: Option<i64>,
}

/// How a node is called.
#[derive(Debug, Clone)]
pub struct NewDelivery {
    /// As shown.
    pub shown: Value,
    /// Its secrets, if it has any.
    pub sealed: Option<Sealed>,
}

/// What became of an enrolment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnrolOutcome {
    /// The node is stored and the new token is its only one.
    Enrolled {
        /// The node.
        node: NodeId,
        /// The token that it replaces.
        replaced_token: Option<TokenHash>,
    },
    /// Another node has the name.
    NameTaken,
    /// The node is new, and the workspace has as many as it may.
    NoRoom,
}

/// What became of minting a direct node's token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectTokenOutcome {
    /// The new token is the node's only one.
    Minted {
        /// The token that it replaces.
        replaced_token: Option<TokenHash>,
    },
    /// The agent is located on this other node.
    BoundElsewhere(NodeId),
    /// There is no such agent.
    NoAgent,
}

impl Store {
    /// Creates or updates a node, found by its id, then its name, then its machine, and gives it a new
    /// token. A node found by name under another id takes the new id, unless it is live. That there is a new
    /// node is recorded.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn enrol_node(
        &self,
        scope: WorkspaceScope,
        enrolment: &NodeEnrolment,
        at: DateTime<Utc>,
    ) -> StoreResult<(EnrolOutcome, Option<Recorded>)> {
        let doing = "enrolling a node";
        let workspace = scope.workspace_id().get();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Two first enrolments of one name would both find nothing: one of them waits here.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($2, $1))")
            .bind(workspace)
            .bind(&enrolment.name)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let found = sqlx::query(
            "SELECT n.node_id, n.name,
                    n.kind <> 'ws' OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = n.node_id
                             AND p.gateway_id IS NOT NULL
                             AND p.last_heartbeat_at > now() - make_interval(secs => $5)) AS live
               FROM nodes n
              WHERE n.workspace_id = $1
                AND (n.node_id = $2 OR n.name = $3 OR ($2 IS NULL AND n.machine_id = $4 AND n.role = 'broker' AND n.kind = 'ws'))
              ORDER BY (n.node_id = $2) DESC NULLS LAST, (n.name = $3) DESC, n.created_at
                FOR UPDATE",
        )
        .bind(workspace)
        .bind(enrolment.node_id.as_ref().map(NodeId::as_str))
        .bind(&enrolment.name)
        .bind(enrolment.machine_id.as_deref())
        .bind(NODE_TTL.as_secs_f64())
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;

        let mut events = Vec::new();
        let node = match found.first() {
            None => {
                let id = enrolment.node_id.clone().unwrap_or_else(|| enrolment.fresh_id.clone());
                insert_node(&mut tx, scope, &id, enrolment).await?;
                if !is_within(&mut tx, scope, Ceiling::Nodes, enrolment.ceiling).await? {
                    return Ok((EnrolOutcome::NoRoom, None));
                }
                events.push(registered(&id, enrolment));
                id
            }
            Some(row) => {
                let stored = NodeId::new(row.get::<String, _>(0));
                let by_id = enrolment.node_id.as_ref() == Some(&stored);
                let name_is_anothers = row.get::<String, _>(1) != enrolment.name
                    && found.iter().skip(1).any(|other| other.get::<String, _>(1) == enrolment.name);
                let id = match &enrolment.node_id {
                    Some(wanted) if !by_id => wanted.clone(),
                    _ => stored.clone(),
                };
                if name_is_anothers || (id != stored && row.get::<bool, _>(2)) {
                    return Ok((EnrolOutcome::NameTaken, None));
                }
                if id != stored {
                    rename_node_id(&mut tx, scope, &stored, &id).await?;
                }
                update_node(&mut tx, scope, &id, enrolment).await?;
                id
            }
        };
        let replaced_token = replace_node_token(&mut tx, scope, &node, enrolment.token_hash).await?;
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok((EnrolOutcome::Enrolled { node, replaced_token }, Some(recorded)))
    }

    /// Changes how a node is called.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn change_delivery(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        adapter: &str,
        delivery: &NewDelivery,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE nodes SET delivery_adapter = $3, delivery = $4, sealed_key_id = $5, sealed = $6, updated_at = now()
              WHERE workspace_id = $1 AND node_id = $2 AND kind = 'http_push'",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(adapter)
        .bind(&delivery.shown)
        .bind(delivery.sealed.as_ref().map(|sealed| &sealed.key_id))
        .bind(delivery.sealed.as_ref().map(|sealed| &sealed.bytes))
        .execute(&self.pool)
        .await
        .map(|_| ())
        .map_err(StoreError::from_sqlx("changing how a node is called"))
    }

    /// Gives an agent's implicit direct node a new token; the node is made on the first call.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn mint_direct_token(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        token_hash: TokenHash,
    ) -> StoreResult<DirectTokenOutcome> {
        let doing = "minting a direct node's token";
        let node = NodeId::direct(agent);
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let located: Option<String> = sqlx::query_scalar(
            "SELECT node_id FROM agents WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL FOR SHARE",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        match located {
            None => return Ok(DirectTokenOutcome::NoAgent),
            Some(other) if other != node.as_str() => {
                return Ok(DirectTokenOutcome::BoundElsewhere(NodeId::new(other)));
            }
            Some(_) => {}
        }
        sqlx::query(
            "INSERT INTO nodes (workspace_id, node_id, name, kind, role, max_agents, created_at)
             VALUES ($1, $2, $3, 'ws', 'direct', 1, now()) ON CONFLICT (workspace_id, node_id) DO NOTHING",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(format!("{DIRECT_NAME_PREFIX}{agent}"))
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let replaced_token = replace_node_token(&mut tx, scope, &node, token_hash).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(DirectTokenOutcome::Minted { replaced_token })
    }
}

/// There is a new node.
fn registered(id: &NodeId, enrolment: &NodeEnrolment) -> NewEvent {
    let data = json!({
        "node_id": id.as_str(), "node_name": enrolment.name, "kind": enrolment.kind,
        "role": enrolment.role.unwrap_or("broker"),
    });
    NewEvent::new(event::NODE_REGISTERED, data)
}

async fn insert_node(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    id: &NodeId,
    enrolment: &NodeEnrolment,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO nodes (workspace_id, node_id, name, role, machine_id, capabilities, tags, version,
                            max_agents, kind, delivery_adapter, delivery, sealed_key_id, sealed, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, coalesce($11, 'ws.node.v1'), $12, $13, $14, now())",
    )
    .bind(scope.workspace_id().get())
    .bind(id.as_str())
    .bind(&enrolment.name)
    .bind(enrolment.role.unwrap_or("broker"))
    .bind(&enrolment.machine_id)
    .bind(enrolment.capabilities.clone().unwrap_or_else(|| Value::Array(Vec::new())))
    .bind(enrolment.tags.clone().unwrap_or_default())
    .bind(&enrolment.version)
    .bind(enrolment.max_agents.unwrap_or(0))
    .bind(enrolment.kind)
    .bind(enrolment.delivery_adapter)
    .bind(enrolment.delivery.as_ref().map(|delivery| &delivery.shown))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.key_id)))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.bytes)))
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("creating a node"))
}

async fn update_node(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    id: &NodeId,
    enrolment: &NodeEnrolment,
) -> StoreResult<()> {
    sqlx::query(
        "UPDATE nodes SET name = $3, role = coalesce($4, role), machine_id = coalesce($5, machine_id),
                capabilities = coalesce($6, capabilities), tags = coalesce($7, tags),
                version = coalesce($8, version), max_agents = coalesce($9, max_agents),
                delivery_adapter = coalesce($10, delivery_adapter), delivery = coalesce($11, delivery),
                sealed_key_id = CASE WHEN $11 IS NULL THEN sealed_key_id ELSE $12 END,
                sealed = CASE WHEN $11 IS NULL THEN sealed ELSE $13 END, updated_at = now()
          WHERE workspace_id = $1 AND node_id = $2",
    )
    .bind(scope.workspace_id().get())
    .bind(id.as_str())
    .bind(&enrolment.name)
    .bind(enrolment.role)
    .bind(&enrolment.machine_id)
    .bind(&enrolment.capabilities)
    .bind(&enrolment.tags)
    .bind(&enrolment.version)
    .bind(enrolment.max_agents)
    .bind(enrolment.delivery_adapter)
    .bind(enrolment.delivery.as_ref().map(|delivery| &delivery.shown))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.key_id)))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.bytes)))
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("updating a node"))
}

/// A broker that comes back under its name with another id: its agents follow, and so does what was defined for it by
/// REST, what its agents' sessions are resumed by, and what waits for it. Its old providers do not, nor what they
/// advertised (none is live), and the token of the old id dies.
async fn rename_node_id(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    from: &NodeId,
    to: &NodeId,
) -> StoreResult<()> {
    for statement in [
        "UPDATE nodes SET node_id = $3 WHERE workspace_id = $1 AND node_id = $2",
        "DELETE FROM providers WHERE workspace_id = $1 AND (node_id = $2 OR node_id = $3)",
        "WITH theirs AS MATERIALIZED (
             SELECT agent_id FROM agents
              WHERE workspace_id = $1 AND (node_id = $2 OR session_node_id = $2)
              ORDER BY agent_id FOR UPDATE
         )
         UPDATE agents a
            SET node_id = CASE WHEN a.node_id = $2 THEN $3 ELSE a.node_id END,
                provider = CASE WHEN a.node_id = $2 THEN NULL ELSE a.provider END,
                session_node_id = CASE WHEN a.session_node_id = $2 THEN $3 ELSE a.session_node_id END
           FROM theirs WHERE a.workspace_id = $1 AND a.agent_id = theirs.agent_id",
        "DELETE FROM node_capabilities WHERE workspace_id = $1 AND (node_id = $2 OR node_id = $3)",
        // A definition under the new id is left from an earlier life of it.
        "DELETE FROM actions c
          WHERE workspace_id = $1
            AND (provider IS NOT NULL AND (handler_node_id = $2 OR handler_node_id = $3)
                 OR provider IS NULL AND handler_node_id = $3
                    AND EXISTS (SELECT FROM actions own
                                 WHERE own.workspace_id = $1 AND own.handler_node_id = $2 AND own.name = c.name
                                   AND own.provider IS NULL))",
        "UPDATE actions SET handler_node_id = $3 WHERE workspace_id = $1 AND handler_node_id = $2",
        "WITH waiting AS MATERIALIZED (
             SELECT invocation_id FROM invocations
              WHERE workspace_id = $1 AND (target_node_id = $2 OR node_id = $2) AND completed_at IS NULL
              ORDER BY invocation_id FOR UPDATE
         )
         UPDATE invocations i
            SET target_node_id = CASE WHEN i.target_node_id = $2 THEN $3 ELSE i.target_node_id END,
                node_id = CASE WHEN i.node_id = $2 THEN $3 ELSE i.node_id END
           FROM waiting WHERE i.workspace_id = $1 AND i.invocation_id = waiting.invocation_id",
        // The token moves along, so that replacing it reports the old hash.
        "UPDATE tokens SET node_id = $3 WHERE workspace_id = $1 AND node_id = $2 AND kind = 'node'",
    ] {
        sqlx::query(statement)
            .bind(scope.workspace_id().get())
            .bind(from.as_str())
            .bind(to.as_str())
            .execute(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx("giving a node another id"))?;
    }
    Ok(())
}

/// Makes `hash` the one token of the node. Returns the hash it replaces.
async fn replace_node_token(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    node: &NodeId,
    hash: TokenHash,
) -> StoreResult<Option<TokenHash>> {
    let doing = "replacing a node's token";
    let replaced: Option<Vec<u8>> = sqlx::query_scalar(
        "SELECT token_hash FROM tokens WHERE workspace_id = $1 AND node_id = $2 AND kind = 'node' FOR UPDATE",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    sqlx::query(
        "INSERT INTO tokens (token_hash, kind, workspace_id, node_id, created_at) VALUES ($3, 'node', $1, $2, now())
         ON CONFLICT (workspace_id, node_id) WHERE kind = 'node'
         DO UPDATE SET token_hash = excluded.token_hash, created_at = excluded.created_at",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(&hash.as_bytes()[..])
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(replaced.as_deref().and_then(read_hash))
}
