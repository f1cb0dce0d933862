//! Where mailboxes stand, for those who look at a workspace.

use relay_domain::AgentId;
pub use relay_store::MailboxRow;

use crate::{Engine, EngineResult, auth::Credential};

/// How many mailboxes a page has, and how many at most.
pub const PAGE: (i64, i64) = (100, 500);

impl Engine {
    /// Up to `limit` mailboxes that the caller may see, in the order of the agents' ids, behind `after`.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn mailboxes(
        &self,
        caller: &Credential,
        after: Option<AgentId>,
        limit: i64,
    ) -> EngineResult<Vec<MailboxRow>> {
        let only = caller.view().filters.agent_ids.as_deref();
        Ok(self.store().mailboxes(caller.scope(), only, after, limit).await?)
    }
}
