//! Repeated spawns: a broker spawns an agent under a name that exists, or repeats a spawn under the same idempotency
//! key. Main type: [`RespawnOutcome`]; called by the engine's agent registration.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, access::token::TokenHash, agents::AgentStatus, nodes::GATEWAY_GRACE};
use sqlx::{FromRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    access::{
        idempotency::{IdempotencyKey, SpawnRecord},
        rotation::end_former_token,
    },
    connections::DatabaseSession,
    decode::decode_row,
    events::{self, RecordedEvents, status_event},
};

/// Outcome of spawning an agent whose name exists. Only [`Self::Adopted`] changes anything.
#[derive(Debug)]
pub enum RespawnOutcome {
    /// The agent has the new token.
    Adopted {
        agent_id: AgentId,
        /// Time of its first registration.
        created_at: DateTime<Utc>,
        replaced_tokens: Vec<TokenHash>,
        /// `true` if the same key was answered with this agent before.
        replayed: bool,
        recorded: RecordedEvents,
    },
    /// A connected provider hosts the agent.
    Hosted,
    /// The key was used with another request body.
    KeyReused,
    /// The agent was deleted meanwhile.
    NotFound,
}

#[derive(FromRow)]
struct RespawnedRow {
    agent_id: AgentId,
    created_at: DateTime<Utc>,
    status: AgentStatus,
    is_hosted: bool,
}

impl Store {
    /// Gives the agent of that name a new token if it is offline, if no connected provider hosts it, or if the same key
    /// was answered with this agent in the last 24 hours. Stores the key in the same transaction.
    pub async fn respawn_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        key: &IdempotencyKey,
        token: TokenHash,
        at: DateTime<Utc>,
    ) -> StoreResult<RespawnOutcome> {
        let doing = "spawning an agent again";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The lock on the agent serialises spawns, token rotations and inventories.
        let agent = sqlx::query(
            "SELECT a.agent_id, a.created_at, a.status,
                    a.status <> 'offline' AND EXISTS (
                        SELECT FROM providers p JOIN gateways g ON g.gateway_id = p.gateway_id
                         WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                           AND (a.provider IS NULL OR p.provider = a.provider)
                           AND g.lease_until >= relay_now() - make_interval(secs => $3)) AS is_hosted
               FROM agents a
              WHERE a.workspace_id = $1 AND a.name = $2 AND a.deleted_at IS NULL FOR UPDATE OF a",
        )
        .bind(scope.workspace_id())
        .bind(name)
        // The same time as for the agents of that gateway to go offline: an agent that runs keeps its token.
        .bind(GATEWAY_GRACE.as_secs_f64())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(agent) = agent else { return Ok(RespawnOutcome::NotFound) };
        let RespawnedRow { agent_id, created_at, status, is_hosted } = decode_row("agents", &agent)?;
        // Read under the lock on the agent, so that two spawns with one key see each other.
        let stored: Option<(Vec<u8>, Option<String>)> = sqlx::query_as(
            "SELECT fingerprint, response ->> 'agent_id' FROM idempotency_keys
              WHERE workspace_id = $1 AND key_hash = $2 AND created_at > $3 - interval '24 hours'",
        )
        .bind(scope.workspace_id())
        .bind(&key.hash[..])
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if stored.as_ref().is_some_and(|(fingerprint, _)| *fingerprint != key.fingerprint) {
            return Ok(RespawnOutcome::KeyReused);
        }
        let replayed = stored.is_some_and(|(_, known)| known == Some(agent_id.to_string()));
        // A repeated key returns the same agent even if it runs by now: the first answer may have been lost.
        if is_hosted && !replayed {
            return Ok(RespawnOutcome::Hosted);
        }
        // A spawn starts a new process: no token of the one before stays valid, not even for the workspace's grace.
        let mut replaced_tokens = end_former_token(&mut tx, scope, agent_id).await?;
        replaced_tokens.extend(replace_token(&mut tx, scope, agent_id, token, at).await?);
        insert_spawn_key(&mut tx, scope, key, agent_id, at).await?;
        let events = match status {
            AgentStatus::Active => Vec::new(),
            AgentStatus::Idle | AgentStatus::Blocked | AgentStatus::Waiting | AgentStatus::Offline => {
                vec![status_event(agent_id, name, AgentStatus::Active)]
            }
        };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        // A repetition would replace the token that the first attempt may have stored.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(RespawnOutcome::Adopted { agent_id, created_at, replaced_tokens, replayed, recorded })
    }

    /// Stores the agent with which a spawn's key was answered.
    pub async fn record_spawn_key(
        &self,
        scope: WorkspaceScope,
        key: &IdempotencyKey,
        agent: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        let doing = "storing the key of a spawn";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        insert_spawn_key(&mut tx, scope, key, agent, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))
    }
}

/// Makes `token` the agent's only token and sets the agent active, as a registration does. Returns the revoked token.
async fn replace_token(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
    token: TokenHash,
    at: DateTime<Utc>,
) -> StoreResult<Option<TokenHash>> {
    // The last SELECT reads the snapshot before the upsert, which is the old hash.
    sqlx::query_scalar(
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
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(token)
    .bind(at)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("replacing an agent's token"))
}

/// Stores a spawn's key.
async fn insert_spawn_key(
    connection: &mut DatabaseSession,
    scope: WorkspaceScope,
    key: &IdempotencyKey,
    agent: AgentId,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    // The WHERE clause keeps the time of a row that says the same, so that repeats do not extend the 24 hours.
    sqlx::query(
        "INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
         VALUES ($1, $2, $3, 201, $4, $5)
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, response = excluded.response, created_at = excluded.created_at
          WHERE idempotency_keys.response <> excluded.response
             OR idempotency_keys.created_at < excluded.created_at - interval '24 hours'",
    )
    .bind(scope.workspace_id())
    .bind(&key.hash[..])
    .bind(&key.fingerprint[..])
    .bind(Json(SpawnRecord { agent_id: agent }))
    .bind(at)
    .execute(connection)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("storing the key of a spawn"))
}
