//! Lookup of bearer tokens by their hash.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, ObserverTokenId, WorkspaceId, WorkspaceScope,
    access::{
        rights::Rights,
        token::{TokenHash, TokenKind},
    },
    agents::AgentKind,
    nodes::{NodeKind, NodeRole},
};
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult, access::rights::decode_rights, decode::decode_row,
    statement_timeout::StatementTimeout as _,
};

/// Holder of a valid token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenOwner {
    Workspace {
        workspace: WorkspaceId,
    },
    Agent {
        workspace: WorkspaceId,
        agent_id: AgentId,
        name: String,
        kind: AgentKind,
        /// Number of rotations, from 1.
        token_generation: i64,
        /// The token was replaced, and is accepted for the workspace's grace.
        is_former: bool,
        rights: Rights,
    },
    Node {
        workspace: WorkspaceId,
        node_id: NodeId,
        role: NodeRole,
        kind: NodeKind,
    },
    /// An opaque observer token with the values of its row.
    Observer {
        workspace: WorkspaceId,
        token_id: ObserverTokenId,
        /// Number of rotations, from 1.
        version: i64,
        scopes: Vec<String>,
        filters: Value,
        /// End of the token or of its workspace, whichever is first.
        expires_at: Option<DateTime<Utc>>,
    },
    /// An inbound webhook, whose posts look its token up with the webhook.
    Webhook {
        workspace: WorkspaceId,
    },
}

/// Result of looking a token up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenLookup {
    Valid {
        owner: TokenOwner,
        /// Workspace that answers for the one of the token.
        answerable: Option<WorkspaceId>,
    },
    /// The token was valid until its workspace expired.
    WorkspaceExpired,
    /// The token is unknown or revoked, or its workspace, agent or node is deleted.
    Unknown,
}

/// Timeout of a lookup, for which all later ones of the process wait: it reads a few rows by their keys.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);

// A former token counts until its own end, or earlier if the workspace has shortened its grace since.
// One token at a time, so that the tables are read by their keys whatever their size was when the plan was made.
const LOOK_UP: &str = "
SELECT k.place, found.*
  FROM unnest($1::bytea[]) WITH ORDINALITY AS k (token_hash, place)
 CROSS JOIN LATERAL (
    WITH presented AS (
        SELECT kind, workspace_id, agent_id, node_id, observer_token_id, false AS is_former
          FROM tokens WHERE token_hash = k.token_hash
         UNION ALL
        SELECT 'agent', f.workspace_id, f.agent_id, NULL, NULL, true
          FROM former_agent_tokens f JOIN workspaces w ON w.workspace_id = f.workspace_id
         WHERE f.token_hash = k.token_hash
           AND least(f.valid_until, f.replaced_at + make_interval(secs => w.agent_token_grace_seconds)) > relay_now()
    )
    SELECT t.kind, t.workspace_id, t.agent_id, t.node_id, t.is_former, a.name, a.type AS agent_type,
           a.token_generation, a.rights, n.role, n.kind AS node_kind,
           w.policy, t.observer_token_id, o.version, o.scopes, o.filters,
           least(o.expires_at, w.expires_at) AS expires_at, w.created_by,
           coalesce(w.expires_at <= relay_now(), false) AS workspace_expired
      FROM presented t
      JOIN workspaces w ON w.workspace_id = t.workspace_id
      LEFT JOIN agents a ON a.workspace_id = t.workspace_id AND a.agent_id = t.agent_id
      LEFT JOIN nodes n ON n.workspace_id = t.workspace_id AND n.node_id = t.node_id
      LEFT JOIN observer_tokens o
             ON o.workspace_id = t.workspace_id AND o.token_id = t.observer_token_id AND o.revoked_at IS NULL
     WHERE w.deleted_at IS NULL
       AND (t.kind <> 'agent' OR (a.agent_id IS NOT NULL AND a.deleted_at IS NULL))
       AND (t.kind <> 'node' OR n.node_id IS NOT NULL)
       AND (t.kind <> 'observer' OR o.token_id IS NOT NULL)
     LIMIT 1
 ) AS found";

fn decode_lookup(row: &PgRow) -> StoreResult<TokenLookup> {
    let doing = "looking up a token";
    if row.try_get("workspace_expired").map_err(StoreError::from_sqlx(doing))? {
        return Ok(TokenLookup::WorkspaceExpired);
    }
    let answerable = row.try_get("created_by").map_err(StoreError::from_sqlx(doing))?;
    Ok(TokenLookup::Valid { owner: decode_row("tokens", row)?, answerable })
}

impl Store {
    /// Looks tokens up, and returns the outcomes in their order. Takes no scope because scopes are created from them.
    ///
    /// # Errors
    /// As a whole when storage is unavailable; of one token when its row does not decode.
    pub async fn look_up_tokens(&self, hashes: &[TokenHash]) -> StoreResult<Vec<StoreResult<TokenLookup>>> {
        let doing = "looking up tokens";
        let bytes: Vec<&[u8]> = hashes.iter().map(|hash| &hash.as_bytes()[..]).collect();
        let read = tokio::time::timeout(LOOKUP_TIMEOUT, sqlx::query(LOOK_UP).bind(bytes).fetch_all(&self.pool));
        // The host of the former primary may never answer.
        let rows = tokio::select! {
            // An answer that has arrived counts, even if the fence closes at the same time.
            biased;
            rows = read => rows.map_err(|_| StoreError::unavailable(doing))?.map_err(StoreError::from_sqlx(doing))?,
            () = self.fence.next_close() => return Err(StoreError::unavailable(doing)),
        };
        // The statement returns no row for an unknown token.
        let mut found: Vec<_> = hashes.iter().map(|_| Ok(TokenLookup::Unknown)).collect();
        for row in &rows {
            let place: i64 = row.try_get("place").map_err(StoreError::from_sqlx(doing))?;
            if let Some(outcome) = usize::try_from(place - 1).ok().and_then(|place| found.get_mut(place)) {
                *outcome = decode_lookup(row);
            }
        }
        Ok(found)
    }

    /// Returns those of these node tokens that are revoked, or whose workspace has ended.
    pub async fn revoked_tokens(&self, hashes: &[TokenHash]) -> StoreResult<Vec<TokenHash>> {
        let hashes: Vec<&[u8]> = hashes.iter().map(|hash| &hash.as_bytes()[..]).collect();
        // Revocation deletes the row of a token, so the tokens without a row are the revoked ones.
        sqlx::query_scalar(
            "SELECT known.token_hash
               FROM unnest($1::bytea[]) AS known (token_hash)
              WHERE NOT EXISTS (
                    SELECT FROM tokens t JOIN workspaces w ON w.workspace_id = t.workspace_id
                     WHERE t.token_hash = known.token_hash
                       AND w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > relay_now()))",
        )
        .bind(hashes)
        .fetch_all(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("looking for revoked tokens"))
    }

    /// Returns whether a workspace has expired and is not deleted.
    pub async fn is_workspace_expired(&self, scope: WorkspaceScope) -> StoreResult<bool> {
        let expired: Option<bool> = sqlx::query_scalar(
            "SELECT coalesce(expires_at <= relay_now(), false) FROM workspaces
              WHERE workspace_id = $1 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the expiry of a workspace"))?;
        Ok(expired == Some(true))
    }
}

impl FromRow<'_, PgRow> for TokenOwner {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let workspace = row.try_get("workspace_id")?;
        Ok(match row.try_get("kind")? {
            TokenKind::Workspace => Self::Workspace { workspace },
            TokenKind::Agent => Self::Agent {
                workspace,
                agent_id: row.try_get("agent_id")?,
                name: row.try_get("name")?,
                kind: row.try_get("agent_type")?,
                token_generation: row.try_get("token_generation")?,
                is_former: row.try_get("is_former")?,
                rights: decode_rights(row)?,
            },
            TokenKind::Node => Self::Node {
                workspace,
                node_id: row.try_get("node_id")?,
                role: row.try_get("role")?,
                kind: row.try_get("node_kind")?,
            },
            TokenKind::Observer => Self::Observer {
                workspace,
                token_id: row.try_get("observer_token_id")?,
                version: row.try_get("version")?,
                scopes: row.try_get("scopes")?,
                filters: row.try_get("filters")?,
                expires_at: row.try_get("expires_at")?,
            },
            TokenKind::Webhook => Self::Webhook { workspace },
        })
    }
}

/// Parses the hashes of revoked tokens, which are dropped from caches. Skips one of a wrong length: no token has it, so
/// no cache does, and it must not prevent the revocation of the others.
pub(crate) fn parse_hashes(hashes: &[Vec<u8>]) -> Vec<TokenHash> {
    hashes.iter().filter_map(|bytes| read_hash(bytes)).collect()
}

/// Reads a stored hash. Only this crate writes hashes, so a wrong length does not occur.
pub(crate) fn read_hash(bytes: &[u8]) -> Option<TokenHash> {
    bytes.try_into().ok().map(TokenHash::from_bytes)
}
