//! Positions of mailboxes, for observers of a workspace.

use relay_domain::AgentId;
pub use relay_store::MailboxRow;

use crate::{Engine, EngineResult, access::authentication::Credential};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 500);

impl Engine {
    /// Lists up to `limit` mailboxes that the caller may see, by agent id, behind `after`.
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
