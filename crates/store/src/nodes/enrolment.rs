//! Enrolment of nodes over REST, and the implicit direct nodes of agents. An enrolment replaces the node's token or
//! keeps it. Main types: [`NodeEnrolment`] and [`EnrolOutcome`]; called by the engine's roster use cases.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    access::token::{ChangeOrigin, TokenHash},
    events::kind,
    nodes::{DIRECT_NAME_PREFIX, NODE_RETENTION, NodeKind, NodeRole},
    workspaces::plan::Quota,
};
use relay_wire::{events::recorded_data::NodeEnrolled, field::ToValue as _};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    access::rotation::{TokenSubject, token_event},
    codes::{BROKER, WS},
    connections::Transaction,
    events::{self, Event, RecordedEvents},
    subscriptions::definitions::EncryptedSecret,
    workspaces::quota_counts::is_within_quota,
};

/// Content of an enrolment. Absent fields keep the stored values.
#[derive(Debug, Clone)]
pub struct NodeEnrolment {
    /// Id chosen by the caller.
    pub node_id: Option<NodeId>,
    /// Id of a new node without one from the caller.
    pub fresh_id: NodeId,
    pub name: String,
    /// Identifies a broker that enrols without a node id.
    pub machine_id: Option<String>,
    /// Kind of a new node; an existing one keeps its kind.
    pub kind: NodeKind,
    /// Name of the delivery protocol.
    pub delivery_adapter: Option<&'static str>,
    /// Delivery settings of kind `http_push`.
    pub delivery: Option<NewDelivery>,
    pub role: Option<NodeRole>,
    /// JSON array of objects.
    pub capabilities: Option<Value>,
    /// Maximum number of agents; 0 means unlimited.
    pub max_agents: Option<i32>,
    pub tags: Option<Vec<String>>,
    pub version: Option<String>,
    pub token: EnrolmentToken,
    /// Maximum number of nodes in the workspace.
    pub quota: Option<i64>,
}

/// Token of an enrolment.
#[derive(Debug, Clone, Copy)]
pub enum EnrolmentToken {
    /// Replaces the token of the node.
    New(TokenHash),
    /// Must be the token of the node, which stays.
    Kept(TokenHash),
    /// Whatever token the node has stays.
    Unchanged,
}

/// Delivery settings of an `http_push` node.
#[derive(Debug, Clone)]
pub struct NewDelivery {
    /// Node that the secrets are encrypted for.
    pub node_id: NodeId,
    /// Settings without secrets, as returned to clients.
    pub public: Value,
    pub sealed: Option<EncryptedSecret>,
}

/// Result of an enrolment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnrolOutcome {
    /// The node is stored, and the token is its only one.
    Enrolled { node: NodeId, replaced_token: Option<TokenHash> },
    /// Another node has the name.
    NameTaken,
    /// The token to keep is not that of the node.
    TokenMismatch,
    /// The node whose token is to be kept does not exist.
    NoNode,
    /// The delivery settings belong to another node: the node was created or deleted since they were read.
    Raced,
    /// The node is new, and the workspace has reached its quota.
    QuotaReached,
}

/// Result of minting a direct node's token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectTokenOutcome {
    Minted {
        replaced_token: Option<TokenHash>,
    },
    BoundElsewhere(NodeId),
    /// The agent has another token by now.
    TokenRotated,
    NoAgent,
}

/// Existing node that an enrolment refers to.
#[derive(sqlx::FromRow)]
struct FoundNode {
    node_id: NodeId,
    name: String,
    /// `true` if the name stays its own: it is live, or was within [`NODE_RETENTION`].
    keeps_name: bool,
}

impl Store {
    /// Creates or updates a node, found by id, then name, then machine. A node that is found by
    /// name under another id takes the new id, unless it is or was live lately. A new node is recorded as an event.
    pub async fn enrol_node(
        &self,
        scope: WorkspaceScope,
        enrolment: &NodeEnrolment,
        at: DateTime<Utc>,
    ) -> StoreResult<(EnrolOutcome, Option<RecordedEvents>)> {
        let doing = "enrolling a node";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let found = lock_nodes(&mut tx, scope, enrolment).await?;
        let mut events = Vec::new();
        let node = match (found.split_first(), enrolment.token) {
            (None, EnrolmentToken::New(_)) => {
                let id = enrolment.node_id.clone().unwrap_or_else(|| enrolment.fresh_id.clone());
                insert_node(&mut tx, scope, &id, enrolment).await?;
                // After the insertion, which the drop of the transaction undoes: the count takes a lock for which
                // enrolments of all other new nodes of the workspace wait.
                if !is_within_quota(&mut tx, scope, Quota::Nodes, enrolment.quota).await? {
                    return Ok((EnrolOutcome::QuotaReached, None));
                }
                events.push(registered_event(&id, enrolment));
                id
            }
            (None, EnrolmentToken::Kept(_) | EnrolmentToken::Unchanged) => return Ok((EnrolOutcome::NoNode, None)),
            (Some((stored, others)), token) => {
                let id = enrolment.node_id.clone().unwrap_or_else(|| stored.node_id.clone());
                // A change of the id revokes the token of the node, so none can be kept.
                if id != stored.node_id && !matches!(token, EnrolmentToken::New(_)) {
                    return Ok((EnrolOutcome::NoNode, None));
                }
                let name_taken =
                    stored.name != enrolment.name && others.iter().any(|other| other.name == enrolment.name);
                if name_taken || (id != stored.node_id && stored.keeps_name) {
                    return Ok((EnrolOutcome::NameTaken, None));
                }
                if id != stored.node_id {
                    rename_node_id(&mut tx, scope, &stored.node_id, &id).await?;
                }
                update_node(&mut tx, scope, &id, enrolment).await?;
                id
            }
        };
        // The id is part of the context of the encryption, so nothing could decrypt the secrets.
        if enrolment.delivery.as_ref().is_some_and(|delivery| delivery.node_id != node) {
            return Ok((EnrolOutcome::Raced, None));
        }
        let replaced_token = match enrolment.token {
            EnrolmentToken::New(token) => replace_node_token(&mut tx, scope, &node, token).await?,
            // Compared under its lock: the token may have been rotated since the caller was authenticated.
            EnrolmentToken::Kept(token) if lock_node_token(&mut tx, scope, &node).await? != Some(token) => {
                return Ok((EnrolOutcome::TokenMismatch, None));
            }
            EnrolmentToken::Kept(_) | EnrolmentToken::Unchanged => None,
        };
        if replaced_token.is_some() {
            events.push(token_event(kind::TOKEN_ROTATED, TokenSubject::Node(&node), ChangeOrigin::WorkspaceKey));
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        // A repetition would replace the token once more.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok((EnrolOutcome::Enrolled { node, replaced_token }, Some(recorded)))
    }

    /// Replaces the token of an agent's implicit direct node, and creates the node on the first call. `generation` is
    /// that of the agent's token: a process may not have heard yet that it was revoked.
    pub async fn mint_direct_token(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        generation: i64,
        token_hash: TokenHash,
    ) -> StoreResult<DirectTokenOutcome> {
        let doing = "minting a direct node's token";
        let node = NodeId::direct(agent);
        // Not `from_commit`: a repetition replaces a token that no client has received, unless another client has asked
        // meanwhile, whose token any other request would replace as well.
        let located: Option<MintRow> = sqlx::query_as(MINT_DIRECT_TOKEN)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(generation)
            .bind(&node)
            .bind(format!("{DIRECT_NAME_PREFIX}{agent}"))
            .bind(NodeKind::Ws)
            .bind(NodeRole::Direct)
            .bind(&token_hash.as_bytes()[..])
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(match located {
            None => DirectTokenOutcome::NoAgent,
            Some(MintRow { token_generation, .. }) if token_generation != generation => {
                DirectTokenOutcome::TokenRotated
            }
            Some(MintRow { node_id, .. }) if node_id != node => DirectTokenOutcome::BoundElsewhere(node_id),
            Some(MintRow { replaced_token, .. }) => DirectTokenOutcome::Minted { replaced_token },
        })
    }
}

/// Row of [`MINT_DIRECT_TOKEN`]: the location of the agent, whether its token was current or not.
#[derive(sqlx::FromRow)]
struct MintRow {
    node_id: NodeId,
    token_generation: i64,
    replaced_token: Option<TokenHash>,
}

/// One statement, which is its own transaction: thousands of agents ask at once after the end of a gateway. The share
/// lock makes rotations, deletions and bindings of the agent wait until the token is stored. The token is read and
/// locked before the upsert, which cannot return the value that it replaces: two rotations must not return the same
/// one. Of two first requests at once the second one returns none, and the check of open sockets finds those with the
/// other token.
const MINT_DIRECT_TOKEN: &str = "
WITH located AS MATERIALIZED (
    SELECT node_id, token_generation, direct_machine_id FROM agents
     WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL FOR SHARE
), own AS MATERIALIZED (
    SELECT node_id, direct_machine_id FROM located WHERE token_generation = $3 AND node_id = $4
), created AS (
    INSERT INTO nodes (workspace_id, node_id, name, kind, role, machine_id, max_agents, created_at)
    SELECT $1, node_id, $5, $6, $7, direct_machine_id, 1, relay_now() FROM own
    ON CONFLICT (workspace_id, node_id) DO NOTHING RETURNING node_id
), replaced AS MATERIALIZED (
    SELECT t.token_hash FROM own JOIN tokens t ON t.workspace_id = $1 AND t.node_id = own.node_id AND t.kind = 'node'
     WHERE (SELECT count(*) FROM created) >= 0
       FOR UPDATE OF t
), stored AS (
    INSERT INTO tokens (token_hash, kind, workspace_id, node_id, created_at)
    SELECT $8, 'node', $1, node_id, relay_now() FROM own WHERE (SELECT count(*) FROM replaced) >= 0
    ON CONFLICT (workspace_id, node_id) WHERE kind = 'node'
    DO UPDATE SET token_hash = excluded.token_hash, created_at = excluded.created_at
)
SELECT node_id, token_generation, (SELECT token_hash FROM replaced) AS replaced_token FROM located";

/// SQL condition on a node `n`: it was connected once and is not now, so a broker of the same machine that lost its
/// state may be the same one. A node that was never connected belongs to another broker that is about to start.
const CONNECTED_BEFORE: &str = "(n.last_connected_at IS NOT NULL
      OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id AND p.node_id = n.node_id))
     AND NOT EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id AND p.node_id = n.node_id
                        AND p.gateway_id IS NOT NULL)";

/// Reads and locks the nodes that an enrolment refers to, the best match first.
async fn lock_nodes(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    enrolment: &NodeEnrolment,
) -> StoreResult<Vec<FoundNode>> {
    let doing = "enrolling a node";
    let is_broker = enrolment.kind == NodeKind::Ws && enrolment.role.is_none_or(|role| role == NodeRole::Broker);
    // Two concurrent first enrolments of a name would both find no row to lock; the advisory lock makes one of them
    // wait.
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($2, $1))")
        .bind(scope.workspace_id())
        .bind(&enrolment.name)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    // Locked in the order of the key, whatever matches best: two enrolments with other names may refer to the same
    // nodes.
    sqlx::query_as(formatcp!(
        "WITH found AS MATERIALIZED (
             SELECT n.node_id, n.name, n.created_at,
                    n.kind <> '{WS}' OR coalesce(n.last_connected_at > relay_now() - make_interval(secs => $5), false)
                    OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = n.node_id
                                  AND p.last_heartbeat_at > relay_now() - make_interval(secs => $5)) AS keeps_name
               FROM nodes n
              WHERE n.workspace_id = $1
                AND (n.node_id = $2 OR n.name = $3 OR ($2 IS NULL AND $6 AND n.machine_id = $4 AND n.role = '{BROKER}'
                     AND n.kind = '{WS}' AND {CONNECTED_BEFORE}))
              ORDER BY n.node_id FOR UPDATE
         )
         SELECT node_id, name, keeps_name FROM found
          ORDER BY (node_id = $2) DESC NULLS LAST, (name = $3) DESC, created_at"
    ))
    .bind(scope.workspace_id())
    .bind(&enrolment.node_id)
    .bind(&enrolment.name)
    .bind(enrolment.machine_id.as_deref())
    .bind(NODE_RETENTION.as_secs_f64())
    .bind(is_broker)
    .fetch_all(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))
}

fn registered_event(id: &NodeId, enrolment: &NodeEnrolment) -> Event {
    let data = NodeEnrolled {
        node_id: id.as_str(),
        node_name: &enrolment.name,
        kind: enrolment.kind.as_str(),
        // An enrolment without a role is a broker's, as in `insert_node`.
        role: enrolment.role.unwrap_or(NodeRole::Broker).as_str(),
    };
    Event::new(kind::NODE_REGISTERED, data.to_value())
}

async fn insert_node(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    id: &NodeId,
    enrolment: &NodeEnrolment,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO nodes (workspace_id, node_id, name, role, machine_id, capabilities, tags, version,
                            max_agents, kind, delivery_adapter, delivery, sealed_key_id, sealed, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, coalesce($11, 'ws.node.v1'), $12, $13, $14, relay_now())",
    )
    .bind(scope.workspace_id())
    .bind(id)
    .bind(&enrolment.name)
    // Absent fields of a new node: a broker, without capabilities or tags, of unlimited capacity (0).
    .bind(enrolment.role.unwrap_or(NodeRole::Broker))
    .bind(&enrolment.machine_id)
    .bind(enrolment.capabilities.clone().unwrap_or_else(|| Value::Array(Vec::new())))
    .bind(enrolment.tags.clone().unwrap_or_default())
    .bind(&enrolment.version)
    .bind(enrolment.max_agents.unwrap_or(0))
    .bind(enrolment.kind)
    .bind(enrolment.delivery_adapter)
    .bind(enrolment.delivery.as_ref().map(|delivery| &delivery.public))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.key_id)))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.bytes)))
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("creating a node"))
}

async fn update_node(
    tx: &mut Transaction,
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
                sealed = CASE WHEN $11 IS NULL THEN sealed ELSE $13 END, updated_at = relay_now()
          WHERE workspace_id = $1 AND node_id = $2",
    )
    .bind(scope.workspace_id())
    .bind(id)
    .bind(&enrolment.name)
    .bind(enrolment.role)
    .bind(&enrolment.machine_id)
    .bind(&enrolment.capabilities)
    .bind(&enrolment.tags)
    .bind(&enrolment.version)
    .bind(enrolment.max_agents)
    .bind(enrolment.delivery_adapter)
    .bind(enrolment.delivery.as_ref().map(|delivery| &delivery.public))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.key_id)))
    .bind(enrolment.delivery.as_ref().and_then(|delivery| Some(&delivery.sealed.as_ref()?.bytes)))
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("updating a node"))
}

/// Changes the id of a broker that enrols again under its name with another id. Its agents, REST definitions, session
/// locations and open invocations move along. Its providers and their capabilities do not (none of them is live), and
/// the token of the old id is revoked.
async fn rename_node_id(tx: &mut Transaction, scope: WorkspaceScope, from: &NodeId, to: &NodeId) -> StoreResult<()> {
    // In the lock order of nodes, agents and invocations. The new id may have rows that an earlier node left.
    for statement in [
        "UPDATE nodes SET node_id = $3 WHERE workspace_id = $1 AND node_id = $2",
        "DELETE FROM providers WHERE workspace_id = $1 AND (node_id = $2 OR node_id = $3)",
        "WITH located AS MATERIALIZED (
             SELECT agent_id FROM agents
              WHERE workspace_id = $1 AND (node_id = $2 OR session_node_id = $2)
              ORDER BY agent_id FOR UPDATE
         )
         UPDATE agents a
            SET node_id = CASE WHEN a.node_id = $2 THEN $3 ELSE a.node_id END,
                hosted_on = CASE WHEN a.hosted_on = $2 THEN $3 ELSE a.hosted_on END,
                provider = CASE WHEN a.node_id = $2 THEN NULL ELSE a.provider END,
                session_node_id = CASE WHEN a.session_node_id = $2 THEN $3 ELSE a.session_node_id END
           FROM located l WHERE a.workspace_id = $1 AND a.agent_id = l.agent_id",
        "DELETE FROM node_capabilities WHERE workspace_id = $1 AND (node_id = $2 OR node_id = $3)",
        // A definition under the new id remains from an earlier node with that id.
        "DELETE FROM actions c
          WHERE workspace_id = $1
            AND (provider IS NOT NULL AND (handler_node_id = $2 OR handler_node_id = $3)
                 OR provider IS NULL AND handler_node_id = $3
                    AND EXISTS (SELECT FROM actions own
                                 WHERE own.workspace_id = $1 AND own.handler_node_id = $2 AND own.name = c.name
                                   AND own.provider IS NULL))",
        "UPDATE actions SET handler_node_id = $3 WHERE workspace_id = $1 AND handler_node_id = $2",
        "WITH unfinished AS MATERIALIZED (
             SELECT invocation_id FROM invocations
              WHERE workspace_id = $1 AND (target_node_id = $2 OR node_id = $2) AND completed_at IS NULL
              ORDER BY invocation_id FOR UPDATE
         )
         UPDATE invocations i
            SET target_node_id = CASE WHEN i.target_node_id = $2 THEN $3 ELSE i.target_node_id END,
                node_id = CASE WHEN i.node_id = $2 THEN $3 ELSE i.node_id END
           FROM unfinished u WHERE i.workspace_id = $1 AND i.invocation_id = u.invocation_id",
        // The token moves along, so that replacing it returns the old hash to revoke.
        "UPDATE tokens SET node_id = $3 WHERE workspace_id = $1 AND node_id = $2 AND kind = 'node'",
    ] {
        sqlx::query(statement)
            .bind(scope.workspace_id())
            .bind(from)
            .bind(to)
            .execute(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx("giving a node another id"))?;
    }
    Ok(())
}

/// Makes `hash` the only token of the node. Returns the replaced hash.
async fn replace_node_token(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    node: &NodeId,
    hash: TokenHash,
) -> StoreResult<Option<TokenHash>> {
    // Read before the upsert, which cannot return the value that it replaces. The lock keeps two rotations from
    // returning the same one.
    let replaced = lock_node_token(tx, scope, node).await?;
    sqlx::query(
        "INSERT INTO tokens (token_hash, kind, workspace_id, node_id, created_at) VALUES ($3, 'node', $1, $2, relay_now())
         ON CONFLICT (workspace_id, node_id) WHERE kind = 'node'
         DO UPDATE SET token_hash = excluded.token_hash, created_at = excluded.created_at",
    )
    .bind(scope.workspace_id())
    .bind(node)
    .bind(&hash.as_bytes()[..])
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("replacing a node's token"))?;
    Ok(replaced)
}

/// Returns the token of a node, and locks it until the commit.
async fn lock_node_token(tx: &mut Transaction, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<TokenHash>> {
    sqlx::query_scalar(
        "SELECT token_hash FROM tokens WHERE workspace_id = $1 AND node_id = $2 AND kind = 'node' FOR UPDATE",
    )
    .bind(scope.workspace_id())
    .bind(node)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("locking a node's token"))
}
