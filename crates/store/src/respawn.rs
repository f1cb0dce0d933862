//! Agents that a broker spawns again under a name it has used before.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, token::TokenHash};
use serde_json::json;
use sqlx::{PgConnection, Row};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Recorded, status_event},
    tokens::read_hash,
};

/// The idempotency key of a spawn, hashed.
#[derive(Debug, Clone, Copy)]
pub struct SpawnKey {
    /// SHA-256 over operation, name and key.
    pub hash: [u8; 32],
    /// SHA-256 over the request body.
    pub fingerprint: [u8; 32],
}

/// What became of spawning an agent whose name is taken.
#[derive(Debug)]
pub enum Respawn {
    /// The spawner has the agent now, with the new token.
    Adopted {
        /// The agent.
        agent_id: AgentId,
        /// When it was first registered.
        created_at: DateTime<Utc>,
        /// The token that died.
        replaced_token: Option<TokenHash>,
        /// Whether the key had been answered before.
        replayed: bool,
        /// That it became active, if it was not.
        recorded: Recorded,
    },
    /// Somebody else hosts the agent now. Nothing was changed.
    Hosted,
    /// The key was used with another body. Nothing was changed.
    KeyReused,
    /// There is no such agent any more.
    Gone,
}

impl Store {
    /// Gives the living agent of that name a new token, if it is offline or nobody connected hosts it, or if
    /// the same key was answered with this agent in the last 24 hours. Remembers the key in the same
    /// transaction.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn respawn_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        key: &SpawnKey,
        token: TokenHash,
        at: DateTime<Utc>,
    ) -> StoreResult<Respawn> {
        let doing = "spawning an agent again";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The agent's row serialises spawns, rotations and inventories.
        let agent = sqlx::query(
            "SELECT a.agent_id, a.created_at, a.status,
                    a.status <> 'offline' AND EXISTS (
                        SELECT FROM providers p JOIN gateways g ON g.gateway_id = p.gateway_id
                         WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                           AND (a.provider IS NULL OR p.provider = a.provider)
                           AND g.lease_until > now()) AS hosted
               FROM agents a
              WHERE a.workspace_id = $1 AND a.name = $2 AND a.deleted_at IS NULL FOR UPDATE OF a",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(agent) = agent else { return Ok(Respawn::Gone) };
        let agent_id = AgentId::new(agent.get("agent_id"));
        let stored: Option<(Vec<u8>, Option<String>)> = sqlx::query_as(
            "SELECT fingerprint, response ->> 'agent_id' FROM idempotency_keys
              WHERE workspace_id = $1 AND key_hash = $2 AND created_at > $3 - interval '24 hours'",
        )
        .bind(scope.workspace_id().get())
        .bind(&key.hash[..])
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if stored.as_ref().is_some_and(|(fingerprint, _)| *fingerprint != key.fingerprint) {
            return Ok(Respawn::KeyReused);
        }
        let replayed = stored.is_some_and(|(_, known)| known == Some(agent_id.to_string()));
        if agent.get::<bool, _>("hosted") && !replayed {
            return Ok(Respawn::Hosted);
        }
        let replaced_token = replace_token(&mut tx, scope, agent_id, token, at).await?;
        remember(&mut tx, scope, key, agent_id, at).await?;
        let was_active = agent.get::<&str, _>("status") == "active";
        let events = if was_active { Vec::new() } else { vec![status_event(agent_id, name, "active")] };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Respawn::Adopted { agent_id, created_at: agent.get("created_at"), replaced_token, replayed, recorded })
    }

    /// Remembers which agent a spawn's key was answered with.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn remember_spawn(
        &self,
        scope: WorkspaceScope,
        key: &SpawnKey,
        agent: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        let mut connection = self.pool.acquire().await.map_err(StoreError::from_sqlx("remembering a spawn"))?;
        remember(&mut connection, scope, key, agent, at).await
    }
}

/// Makes `token` the agent's only one and brings it online, as a registration does.
async fn replace_token(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    agent: AgentId,
    token: TokenHash,
    at: DateTime<Utc>,
) -> StoreResult<Option<TokenHash>> {
    // The old hash comes from the snapshot before the upsert.
    let old: Option<Vec<u8>> = sqlx::query_scalar(
        "WITH agent AS (
             UPDATE agents SET token_generation = token_generation + 1, status = 'active',
                    last_seen_at = greatest(last_seen_at, $4)
              WHERE workspace_id = $1 AND agent_id = $2
         ), token AS (
             INSERT INTO tokens (token_hash, kind, workspace_id, agent_id, created_at)
             VALUES ($3, 'agent', $1, $2, $4)
             ON CONFLICT (workspace_id, agent_id) WHERE kind = 'agent'
             DO UPDATE SET token_hash = excluded.token_hash, created_at = excluded.created_at
         )
         SELECT token_hash FROM tokens WHERE workspace_id = $1 AND agent_id = $2 AND kind = 'agent'",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .bind(&token.as_bytes()[..])
    .bind(at)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("replacing an agent's token"))?;
    Ok(old.as_deref().and_then(read_hash))
}

/// The answer itself is not kept: it holds a token, so a replay is answered with a new one.
async fn remember(
    connection: &mut PgConnection,
    scope: WorkspaceScope,
    key: &SpawnKey,
    agent: AgentId,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
         VALUES ($1, $2, $3, 201, $4, $5)
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, response = excluded.response, created_at = excluded.created_at
          WHERE idempotency_keys.response <> excluded.response
             OR idempotency_keys.created_at < excluded.created_at - interval '24 hours'",
    )
    .bind(scope.workspace_id().get())
    .bind(&key.hash[..])
    .bind(&key.fingerprint[..])
    .bind(json!({ "agent_id": agent.to_string() }))
    .bind(at)
    .execute(connection)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("remembering a spawn"))
}
