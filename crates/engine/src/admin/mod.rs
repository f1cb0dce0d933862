//! What operators do with direct access to Postgres and NATS: `relayctl`. No request of a client comes here, and no gateway has to run.
//!
//! Gateways are not told of changes made here: a token that was killed may live for 2 s where it is remembered.

mod doctor;
mod erase;
mod holds;
mod quotas;
mod restore;

use chrono::Utc;
use relay_domain::{
    AgentId, ChannelId, DeliveryId, WorkspaceId, WorkspaceScope,
    names::{MAX_WORKSPACE_NAME_BYTES, check_name},
    token::{TOKEN_BYTES, TokenHash, TokenKind},
};
pub use relay_store::admin::{
    DeadLetterRow, Erased, ExportedRow, MailboxException, MailboxFrame, MailboxInside, TokenKilled, WorkspaceSummary,
};
use relay_store::{NewWorkspace, NodeFilter, NodeProviderRow, NodeRow, Store};
use serde_json::json;

use crate::{
    EngineError, EngineResult, IdSource,
    usage::{UsageQuery, UsageReport},
};

pub use doctor::{Finding, Verdict, examine};
pub use erase::{Erasure, Place};
pub use restore::RestoreReport;

/// Connections: commands are one thing at a time.
const CONNECTIONS: u32 = 2;
/// How long the worker number for the ids of single rows is leased for, in seconds. Nobody gives it back.
const LEASE_SECONDS: i32 = 60;

/// Direct access.
pub struct Admin {
    store: Store,
}

/// A workspace that was made.
#[derive(Debug)]
pub struct MadeWorkspace {
    /// Its id.
    pub workspace_id: WorkspaceId,
    /// Its key: shown once.
    pub key: String,
}

/// A mailbox with what is unusual in it and what is newest.
#[derive(Debug, serde::Serialize)]
pub struct InspectedMailbox {
    /// Where it stands.
    #[serde(flatten)]
    pub inside: MailboxInside,
    /// Rows settled or parked one by one, newest first.
    pub exceptions: Vec<MailboxException>,
    /// The newest rows.
    pub frames: Vec<MailboxFrame>,
}

/// A dead letter by the ids that the API gives it.
#[derive(Debug, serde::Serialize)]
pub struct ListedLetter {
    /// What redrives and purges one letter.
    pub delivery_id: String,
    /// The delivery that took its place, if it was redriven.
    pub redriven_as: Option<String>,
    /// The row.
    #[serde(flatten)]
    pub row: DeadLetterRow,
}

impl From<DeadLetterRow> for ListedLetter {
    fn from(row: DeadLetterRow) -> Self {
        let id = DeliveryId { source: row.source_id, agent: AgentId::new(row.agent_id), redrive_no: row.redrive_no };
        let next = row.redriven_seq.map(|_| DeliveryId { redrive_no: id.redrive_no + 1, ..id });
        Self { delivery_id: id.to_string(), redriven_as: next.map(|next| next.to_string()), row }
    }
}

impl Admin {
    /// Connects when first asked something.
    ///
    /// # Errors
    /// When the URL is not a Postgres URL.
    pub fn connect(database_url: &str) -> EngineResult<Self> {
        Ok(Self { store: Store::connect(database_url, CONNECTIONS)? })
    }

    /// Workspaces of any state, by age; of one name if one is given.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn workspaces(&self, name: Option<&str>, after: i64, limit: i64) -> EngineResult<Vec<WorkspaceSummary>> {
        Ok(self.store.workspace_summaries(name, after, limit).await?)
    }

    /// The workspace of an id, or the only one of a name that is not deleted.
    ///
    /// # Errors
    /// When there is none, or several have the name.
    pub async fn find(&self, id_or_name: &str) -> EngineResult<WorkspaceScope> {
        let of = |id: i64| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        if let Ok(id) = id_or_name.parse::<WorkspaceId>()
            && self.store.is_deleted(of(id.get())).await?.is_some()
        {
            return Ok(of(id.get()));
        }
        let named = self.store.workspace_summaries(Some(id_or_name), 0, 1000).await?;
        let mut living = named.iter().filter(|workspace| workspace.deleted_at.is_none());
        match (living.next(), living.next()) {
            (Some(only), None) => Ok(of(only.workspace_id)),
            (None, _) => Err(EngineError::WorkspaceNotFound),
            (Some(_), Some(_)) => Err(EngineError::InvalidRequest(format!(
                "several workspaces are called {id_or_name}: name one by its id, as `workspace list --name` shows them"
            ))),
        }
    }

    /// Makes a workspace with its `general` channel.
    ///
    /// # Errors
    /// When the name is out of bounds, or storage is away.
    pub async fn create_workspace(&self, name: &str) -> EngineResult<MadeWorkspace> {
        check_name("name", name, MAX_WORKSPACE_NAME_BYTES)?;
        let owner = format!("relayctl-{}", std::process::id());
        let worker = self.store.lease_worker_id(&owner, LEASE_SECONDS).await?.ok_or(EngineError::NoWorkerNumber)?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.correct(&self.store).await?;
        let (key, hash) = fresh(TokenKind::Workspace)?;
        let workspace_id = WorkspaceId::new(ids.next_id());
        let new = NewWorkspace {
            workspace_id,
            name,
            metadata: &json!({}),
            provenance: None,
            created_at: chrono::DateTime::from_timestamp_millis(ids.now_ms()).unwrap_or_default(),
            expires_at: None,
            key: hash,
            general: ChannelId::new(ids.next_id()),
        };
        self.store.create_workspace(&new, None).await?;
        Ok(MadeWorkspace { workspace_id, key })
    }

    /// Gives a workspace one more key, beside those that it has.
    ///
    /// # Errors
    /// When it is not alive, or storage is away.
    pub async fn add_key(&self, scope: WorkspaceScope) -> EngineResult<String> {
        let (key, hash) = fresh(TokenKind::Workspace)?;
        if self.store.add_workspace_key(scope, hash).await? { Ok(key) } else { Err(EngineError::WorkspaceNotFound) }
    }

    /// Kills a token. `None` when no row stands for it: it is unknown, dead already, or a signed one.
    ///
    /// # Errors
    /// When the text is no token, or storage is away.
    pub async fn kill_token(&self, token: &str) -> EngineResult<Option<TokenKilled>> {
        let kind = TokenKind::of(token).ok_or(EngineError::InvalidTokenFormat)?;
        if kind == TokenKind::Observer {
            return Err(EngineError::InvalidRequest(
                "observer tokens are revoked over the API: DELETE /v1/observer-tokens/:id".into(),
            ));
        }
        Ok(self.store.kill_token(TokenHash::of(token)).await?)
    }

    /// What a workspace used.
    ///
    /// # Errors
    /// When the while is too long for its granularity, or storage is away.
    pub async fn usage(&self, scope: WorkspaceScope, query: UsageQuery) -> EngineResult<UsageReport> {
        crate::usage::report(&self.store, scope, query, Utc::now()).await
    }

    /// The nodes of a workspace with their processes.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn nodes(&self, scope: WorkspaceScope, limit: i64) -> EngineResult<Vec<(NodeRow, Vec<NodeProviderRow>)>> {
        let nodes = self.store.nodes(scope, &NodeFilter { limit, ..NodeFilter::default() }).await?;
        let ids: Vec<String> = nodes.iter().map(|node| node.node_id.clone()).collect();
        let mut providers = self.store.providers_of_nodes(scope, &ids).await?;
        Ok(nodes
            .into_iter()
            .map(|node| {
                let own = providers.extract_if(.., |provider| provider.node_id == node.node_id).collect();
                (node, own)
            })
            .collect())
    }

    /// A mailbox with up to `limit` of its exceptions and newest rows.
    ///
    /// # Errors
    /// When there is no such living agent, or storage is away.
    pub async fn mailbox(&self, scope: WorkspaceScope, agent: &str, limit: i64) -> EngineResult<InspectedMailbox> {
        let inside = self.store.mailbox_inside(scope, agent).await?;
        let inside = inside.ok_or_else(|| EngineError::AgentNotFound(agent.to_owned()))?;
        let id = AgentId::new(inside.agent_id);
        let exceptions = self.store.mailbox_exceptions(scope, id, limit).await?;
        let frames = self.store.mailbox_frames(scope, id, limit).await?;
        Ok(InspectedMailbox { inside, exceptions, frames })
    }

    /// Dead letters that are still kept and were not purged, newest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn dead_letters(
        &self,
        scope: WorkspaceScope,
        agent: Option<&str>,
        limit: i64,
    ) -> EngineResult<Vec<ListedLetter>> {
        let rows = self.store.dead_letter_rows(scope, agent, limit).await?;
        Ok(rows.into_iter().map(ListedLetter::from).collect())
    }
}

fn fresh(kind: TokenKind) -> EngineResult<(String, TokenHash)> {
    let mut random = [0; TOKEN_BYTES];
    getrandom::fill(&mut random).map_err(|_| EngineError::NoRandomness)?;
    let text = kind.token(random);
    let hash = TokenHash::of(&text);
    Ok((text, hash))
}
