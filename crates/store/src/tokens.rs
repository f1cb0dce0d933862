//! Tokens: whom a token hash stands for.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, NodeId, ObserverTokenId, WorkspaceId, agent::AgentKind, token::TokenHash};
use serde_json::Value;
use sqlx::Row;

use crate::{Store, StoreError, StoreResult};

/// Whom a live token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenOwner {
    /// A workspace's key.
    Workspace {
        /// The workspace.
        workspace: WorkspaceId,
    },
    /// An agent's token.
    Agent {
        /// The workspace.
        workspace: WorkspaceId,
        /// The agent.
        agent_id: AgentId,
        /// Its name.
        name: String,
        /// What it is.
        kind: AgentKind,
        /// How often its token has been rotated, from 1.
        token_generation: i64,
    },
    /// A node's token.
    Node {
        /// The workspace.
        workspace: WorkspaceId,
        /// The node.
        node_id: NodeId,
    },
    /// An opaque observer token, with what its row says.
    Observer {
        /// The workspace.
        workspace: WorkspaceId,
        /// The token.
        token_id: ObserverTokenId,
        /// How often it was rotated, from 1.
        version: i64,
        /// Texts of its scopes.
        scopes: Vec<String>,
        /// Its filters, an object.
        filters: Value,
        /// When it ends, or its workspace does.
        expires_at: Option<DateTime<Utc>>,
    },
}

impl Store {
    /// Whom a token stands for. `None` when there is no such token, or its workspace or agent is deleted
    /// or expired.
    ///
    /// The one read that takes no scope: it is what makes scopes.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn token_owner(&self, hash: &TokenHash) -> StoreResult<Option<TokenOwner>> {
        let doing = "looking up a token";
        let row = sqlx::query(
            "SELECT t.kind, t.workspace_id, t.agent_id, t.node_id, a.name, a.type AS agent_type, a.token_generation,
                    t.observer_token_id, o.version, o.scopes, o.filters, least(o.expires_at, w.expires_at) AS expires_at
             FROM tokens t
             JOIN workspaces w ON w.workspace_id = t.workspace_id
             LEFT JOIN agents a ON a.workspace_id = t.workspace_id AND a.agent_id = t.agent_id
             LEFT JOIN observer_tokens o
                    ON o.workspace_id = t.workspace_id AND o.token_id = t.observer_token_id AND o.revoked_at IS NULL
             WHERE t.token_hash = $1
               AND w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > now())
               AND (t.kind <> 'agent' OR (a.agent_id IS NOT NULL AND a.deleted_at IS NULL))
               AND (t.kind <> 'observer' OR o.token_id IS NOT NULL)",
        )
        .bind(&hash.as_bytes()[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let read = || -> sqlx::Result<TokenOwner> {
            let workspace = WorkspaceId::new(row.try_get("workspace_id")?);
            Ok(match row.try_get::<&str, _>("kind")? {
                "agent" => TokenOwner::Agent {
                    workspace,
                    agent_id: AgentId::new(row.try_get("agent_id")?),
                    name: row.try_get("name")?,
                    kind: AgentKind::parse(row.try_get("agent_type")?).unwrap_or_default(),
                    token_generation: row.try_get("token_generation")?,
                },
                "node" => TokenOwner::Node { workspace, node_id: NodeId::new(row.try_get::<String, _>("node_id")?) },
                "observer" => TokenOwner::Observer {
                    workspace,
                    token_id: ObserverTokenId::new(row.try_get("observer_token_id")?),
                    version: row.try_get("version")?,
                    scopes: row.try_get("scopes")?,
                    filters: row.try_get("filters")?,
                    expires_at: row.try_get("expires_at")?,
                },
                _ => TokenOwner::Workspace { workspace },
            })
        };
        read().map(Some).map_err(StoreError::from_sqlx(doing))
    }
}

/// A stored hash, if it has the right length (a CHECK in spirit: only this crate writes them).
pub(crate) fn read_hash(bytes: &[u8]) -> Option<TokenHash> {
    bytes.try_into().ok().map(TokenHash::from_bytes)
}
