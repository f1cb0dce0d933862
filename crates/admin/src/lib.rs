//! Operator commands with direct access to Postgres and NATS, for `relayctl`. Requests of clients never come here, and
//! no gateway has to run.
//!
//! Gateways get no hints of changes made here: a revoked token may be accepted for 1 s from a cache.

mod doctor;
mod erase;
mod quotas;
mod restore;
mod suspensions;

use relay_domain::{
    ChannelId, DeliveryId, WorkspaceId, WorkspaceScope,
    access::token::{TOKEN_BYTES, TokenHash, TokenKind},
    names::{MAX_WORKSPACE_NAME_BYTES, check_name},
    nodes::{RosterNode, roster::NodeFilter},
    workspaces::plan::Plan,
};
pub use relay_store::admin::{
    DeadLetterSummary, ExportedRow, MailboxDetails, MailboxEntry, MailboxSettlement, RevokedToken, TableRowCount,
    WorkspaceSummary,
};
use relay_store::{NewWorkspace, Store};
use serde_json::Map;

use relay_engine::{
    EngineError, EngineResult, IdSource,
    error::{BadCredential, Fault, Missing},
    workspaces::usage::{UsageQuery, UsageReport},
};

pub use doctor::{Finding, Installation, Verdict, examine};
pub use erase::{Erasure, LeftoverCount};
pub use restore::RestoreReport;

/// Commands run one statement at a time.
const CONNECTIONS: u32 = 2;
/// Lease of the worker number for the ids of a command, in seconds. Only a restore renews it.
const LEASE_SECONDS: i32 = 60;

/// Returns the name under which this process owns leases.
fn process_name() -> String {
    format!("relayctl-{}", std::process::id())
}

/// Access of an operator to one installation.
pub struct Admin {
    store: Store,
}

/// New workspace with its key, which is shown once.
#[derive(Debug)]
pub struct WorkspaceWithKey {
    pub workspace_id: WorkspaceId,
    pub key: String,
}

/// Mailbox with its unusual and newest rows.
#[derive(Debug, serde::Serialize)]
pub struct InspectedMailbox {
    #[serde(flatten)]
    pub inside: MailboxDetails,
    /// `exceptions` in the JSON of relayctl, as in the name of their table.
    #[serde(rename = "exceptions")]
    pub settlements: Vec<MailboxSettlement>,
    pub frames: Vec<MailboxEntry>,
}

/// Dead letter with its public ids.
#[derive(Debug, serde::Serialize)]
pub struct ListedDeadLetter {
    /// Id for redriving and purging one dead letter.
    pub delivery_id: String,
    /// Delivery that replaced it, if it was redriven.
    pub redriven_as: Option<String>,
    #[serde(flatten)]
    pub row: DeadLetterSummary,
}

impl From<DeadLetterSummary> for ListedDeadLetter {
    fn from(row: DeadLetterSummary) -> Self {
        let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
        let next = row.redriven_seq.map(|_| DeliveryId { redrive_no: id.redrive_no + 1, ..id });
        Self { delivery_id: id.to_string(), redriven_as: next.map(|next| next.to_string()), row }
    }
}

impl Admin {
    /// Creates the access; it connects on first use.
    ///
    /// # Errors
    /// When the URL is not a Postgres URL.
    pub fn connect(database_url: &str) -> EngineResult<Self> {
        Ok(Self { store: Store::connect(database_url, CONNECTIONS)? })
    }

    /// Lists workspaces of any state by age, or those of one name.
    pub async fn workspaces(
        &self,
        name: Option<&str>,
        after: WorkspaceId,
        limit: i64,
    ) -> EngineResult<Vec<WorkspaceSummary>> {
        Ok(self.store.workspace_summaries(name, after, limit).await?)
    }

    /// Finds a workspace by id, or the only undeleted one of a name.
    ///
    /// # Errors
    /// When the name is unknown, or several have it.
    pub async fn find_workspace(&self, id_or_name: &str) -> EngineResult<WorkspaceScope> {
        // The id first: a workspace may have a number as its name.
        if let Ok(scope) = id_or_name.parse().map(WorkspaceScope::from_engine_row)
            && self.store.is_deleted(scope).await?.is_some()
        {
            return Ok(scope);
        }
        // Names are not unique, and the deleted workspaces are listed too.
        let named = self.store.workspace_summaries(Some(id_or_name), WorkspaceId::new(0), 1000).await?;
        let mut living = named.iter().filter(|workspace| workspace.deleted_at.is_none());
        match (living.next(), living.next()) {
            (Some(only), None) => Ok(WorkspaceScope::from_engine_row(only.workspace_id)),
            (None, _) => Err(EngineError::NotFound(Missing::Workspace)),
            (Some(_), Some(_)) => Err(EngineError::invalid_request(format!(
                "several workspaces are called {id_or_name}: name one by its id, as `workspace list --name` shows them"
            ))),
        }
    }

    /// Leases a worker number for the ids of this process. Returns the number and its ids.
    async fn lease_ids(&self, owner: &str) -> EngineResult<(i16, IdSource)> {
        let worker = self.store.lease_worker_id(owner, LEASE_SECONDS).await?;
        let worker = worker.ok_or(EngineError::Internal(Fault::NoWorkerNumber))?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.synchronize(&self.store).await?;
        Ok((worker, ids))
    }

    /// Creates a workspace with its `general` channel.
    ///
    /// # Errors
    /// When the name is out of bounds.
    pub async fn create_workspace(&self, name: &str, plan: Plan) -> EngineResult<WorkspaceWithKey> {
        check_name("name", name, MAX_WORKSPACE_NAME_BYTES)?;
        let (_, ids) = self.lease_ids(&process_name()).await?;
        let (key, hash) = new_token(TokenKind::Workspace)?;
        let workspace_id = WorkspaceId::new(ids.next_id());
        let new = NewWorkspace {
            workspace_id,
            name,
            plan,
            created_by: None,
            metadata: &Map::new().into(),
            provenance: None,
            created_at: ids.now(),
            expires_at: None,
            key: hash,
            general: ChannelId::new(ids.next_id()),
        };
        // Without an owner and an idempotency key there is no other outcome.
        self.store.create_workspace(&new, None).await?;
        Ok(WorkspaceWithKey { workspace_id, key })
    }

    /// Adds a key to a workspace.
    ///
    /// # Errors
    /// When it has been deleted.
    pub async fn add_key(&self, scope: WorkspaceScope) -> EngineResult<String> {
        let (key, hash) = new_token(TokenKind::Workspace)?;
        if self.store.add_workspace_key(scope, hash).await? {
            Ok(key)
        } else {
            Err(EngineError::NotFound(Missing::Workspace))
        }
    }

    /// Revokes a token. `None` when no row has it: it is unknown, revoked before, or a signed token.
    ///
    /// # Errors
    /// When the text is no token.
    pub async fn revoke_token(&self, token: &str) -> EngineResult<Option<RevokedToken>> {
        let kind = TokenKind::from_prefix(token).ok_or(EngineError::Unauthenticated(BadCredential::TokenFormat))?;
        // Most have no row with their hash: they are signed, and end by an override.
        if kind == TokenKind::Observer {
            return Err(EngineError::invalid_request(
                "observer tokens are revoked over the API: DELETE /v1/observer-tokens/:id",
            ));
        }
        Ok(self.store.revoke_token(TokenHash::from_token(token)).await?)
    }

    /// Returns the usage of a workspace.
    ///
    /// # Errors
    /// When the range is too long for its granularity.
    pub async fn usage(&self, scope: WorkspaceScope, query: UsageQuery) -> EngineResult<UsageReport> {
        // The clock of Postgres, since this machine may be set wrongly.
        relay_engine::workspaces::usage::usage_report(&self.store, scope, query, self.store.now().await?).await
    }

    /// Lists the nodes of a workspace with their providers.
    pub async fn nodes(&self, scope: WorkspaceScope, limit: i64) -> EngineResult<Vec<RosterNode>> {
        let filter = NodeFilter { limit, ..NodeFilter::default() };
        Ok(relay_engine::nodes::roster::list_nodes(&self.store, scope, &filter).await?)
    }

    /// Inspects a mailbox, with up to `limit` of its settlements and newest rows.
    ///
    /// # Errors
    /// When there is no such agent.
    pub async fn mailbox(&self, scope: WorkspaceScope, agent: &str, limit: i64) -> EngineResult<InspectedMailbox> {
        let inside = self.store.mailbox_details(scope, agent).await?;
        let inside = inside.ok_or_else(|| EngineError::NotFound(Missing::Agent(agent.to_owned())))?;
        let settlements = self.store.mailbox_settlements(scope, inside.agent_id, limit).await?;
        let frames = self.store.mailbox_entries(scope, inside.agent_id, limit).await?;
        Ok(InspectedMailbox { inside, settlements, frames })
    }

    /// Lists dead letters that are still kept and not purged, newest first.
    pub async fn dead_letters(
        &self,
        scope: WorkspaceScope,
        agent: Option<&str>,
        limit: i64,
    ) -> EngineResult<Vec<ListedDeadLetter>> {
        let rows = self.store.dead_letter_rows(scope, agent, limit).await?;
        Ok(rows.into_iter().map(ListedDeadLetter::from).collect())
    }
}

fn new_token(kind: TokenKind) -> EngineResult<(String, TokenHash)> {
    let mut random = [0; TOKEN_BYTES];
    getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
    let text = kind.format_token(random);
    let hash = TokenHash::from_token(&text);
    Ok((text, hash))
}
