//! Rotation of agents' tokens, and the former token that a workspace may accept for a while. Used by the agent use
//! cases of this crate.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, ObserverTokenId, WorkspaceScope,
    access::token::{ChangeOrigin, TokenHash, TokenKind},
    events::kind,
};
use relay_wire::{events::recorded_data::TokenChanged, field::ToValue as _};

use crate::{
    Store, StoreError, StoreResult,
    connections::DatabaseSession,
    events::{self, Event, RecordedEvents},
    mailboxes::claims::end_leases,
};

/// Subject of a token, for its events.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenSubject<'a> {
    Workspace,
    Agent(AgentId),
    Node(&'a NodeId),
    Observer(ObserverTokenId),
}

/// Creates the event of a change to a token.
pub(crate) fn token_event(kind: &'static str, subject: TokenSubject<'_>, by: ChangeOrigin) -> Event {
    let (token, agent_id, node_id, observer_token_id) = match subject {
        TokenSubject::Workspace => (TokenKind::Workspace, None, None, None),
        TokenSubject::Agent(agent) => (TokenKind::Agent, Some(agent), None, None),
        TokenSubject::Node(node) => (TokenKind::Node, None, Some(node.as_str()), None),
        TokenSubject::Observer(token) => (TokenKind::Observer, None, None, Some(token)),
    };
    let data = TokenChanged { token: token.into(), by: by.as_str(), agent_id, node_id, observer_token_id };
    let event = Event::new(kind, data.to_value());
    match agent_id {
        Some(agent) => event.by_agent(agent),
        None => event,
    }
}

/// Rotation of an agent's token.
#[derive(Debug)]
pub struct TokenRotation {
    pub agent: AgentId,
    pub token: TokenHash,
    pub by: ChangeOrigin,
    /// Generation of the token that an agent presented: a process may not have heard yet that it was revoked.
    pub presented_generation: Option<i64>,
    pub at: DateTime<Utc>,
}

/// Effect of a rotation or revocation.
#[derive(Debug)]
pub struct ChangedToken {
    /// Tokens that ended, and a kept former token. Caches must forget them.
    pub changed: Vec<TokenHash>,
    pub recorded: RecordedEvents,
}

impl Store {
    /// Replaces an agent's token and increments its generation. The token before it stays valid for the workspace's
    /// grace, unless a node took the agent over; the one before that ends. The workspace key also ends the token of the
    /// agent's own node, and the leases of deliveries that the agent has claimed. Returns `None` when there is no such
    /// agent, or it has another generation than was presented.
    pub async fn rotate_agent_token(
        &self,
        scope: WorkspaceScope,
        rotation: &TokenRotation,
    ) -> StoreResult<Option<ChangedToken>> {
        let &TokenRotation { agent, by, at, .. } = rotation;
        let doing = "rotating an agent's token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let Some(changed) = replace_agent_token(&mut tx, scope, rotation).await? else { return Ok(None) };
        // A broker that returns takes over all its agents; their status events say so already.
        let events = match by {
            ChangeOrigin::Node => Vec::new(),
            ChangeOrigin::WorkspaceKey | ChangeOrigin::Operator | ChangeOrigin::Agent => {
                vec![token_event(kind::TOKEN_ROTATED, TokenSubject::Agent(agent), by)]
            }
        };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        // A repetition would be a second rotation, so the caller has to learn that the outcome is unknown.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some(ChangedToken { changed, recorded }))
    }
}

/// Replaces an agent's token as [`Store::rotate_agent_token`] does, within a transaction and without events. Returns
/// the tokens that ended, and a kept former token.
pub(crate) async fn replace_agent_token(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    rotation: &TokenRotation,
) -> StoreResult<Option<Vec<TokenHash>>> {
    let &TokenRotation { agent, token, by, presented_generation, at } = rotation;
    let doing = "rotating an agent's token";
    // The lock on the agent serialises rotations.
    let found = sqlx::query(
        "UPDATE agents SET token_generation = token_generation + 1
         WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL
           AND ($3::bigint IS NULL OR token_generation = $3)",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(presented_generation)
    .execute(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    if found.rows_affected() == 0 {
        return Ok(None);
    }
    // ends_direct_node: a rotation by the workspace key may answer a theft, so the agent's own connection ends at once.
    // keeps_former: not for a node, whose take-over must leave the former holder no token.
    let (keeps_former, ends_direct_node) = match by {
        ChangeOrigin::WorkspaceKey | ChangeOrigin::Operator => (true, true),
        ChangeOrigin::Agent => (true, false),
        ChangeOrigin::Node => (false, false),
    };
    // Before the replaced token is kept: the primary key allows one former token of an agent.
    let mut changed = end_former_token(tx, scope, agent).await?;
    let replaced = delete_tokens(tx, scope, agent, ends_direct_node).await?;
    changed.extend(replaced.iter().map(|(hash, _)| *hash));
    if let Some((former, _)) = replaced.iter().find(|(_, kind)| keeps_former && *kind == TokenKind::Agent) {
        keep_former_token(tx, scope, agent, *former).await?;
    }
    // Otherwise the deliveries that the former holder has claimed would stay claimed until their leases end.
    if ends_direct_node {
        end_leases(tx, scope, agent).await?;
    }
    sqlx::query(
        "INSERT INTO tokens (token_hash, kind, workspace_id, agent_id, created_at) VALUES ($3, 'agent', $1, $2, $4)",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(token)
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(Some(changed))
}

/// Deletes the agent's token, and that of its own node if asked to. Returns them.
async fn delete_tokens(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
    ends_direct_node: bool,
) -> StoreResult<Vec<(TokenHash, TokenKind)>> {
    sqlx::query_as(
        "DELETE FROM tokens
          WHERE workspace_id = $1
            AND (kind = 'agent' AND agent_id = $2 OR $3 AND kind = 'node' AND node_id = $4)
         RETURNING token_hash, kind",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(ends_direct_node)
    .bind(NodeId::direct(agent))
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("revoking an agent's tokens"))
}

/// Ends the former token of an agent, and returns it.
pub(crate) async fn end_former_token(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
) -> StoreResult<Vec<TokenHash>> {
    sqlx::query_scalar("DELETE FROM former_agent_tokens WHERE workspace_id = $1 AND agent_id = $2 RETURNING token_hash")
        .bind(scope.workspace_id())
        .bind(agent)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("ending the former token of an agent"))
}

/// Keeps a replaced token for the workspace's grace, if it has one.
async fn keep_former_token(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
    former: TokenHash,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO former_agent_tokens (workspace_id, agent_id, token_hash, replaced_at, valid_until)
         SELECT workspace_id, $2, $3, relay_now(), relay_now() + make_interval(secs => agent_token_grace_seconds)
           FROM workspaces WHERE workspace_id = $1 AND agent_token_grace_seconds > 0",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(former)
    .execute(tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("keeping the former token of an agent"))
}
