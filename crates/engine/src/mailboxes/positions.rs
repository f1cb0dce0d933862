//! Positions of mailboxes, for observers of a workspace.

use relay_domain::{AgentId, mailboxes::Mailbox};

use super::Mailboxes;
use crate::{EngineResult, access::callers::Credential};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 500);

impl Mailboxes {
    /// Lists up to `limit` mailboxes that the caller may see, by agent id, behind `after`.
    pub async fn list(&self, caller: &Credential, after: Option<AgentId>, limit: i64) -> EngineResult<Vec<Mailbox>> {
        let only = caller.view().filters.agent_ids.as_deref();
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        Ok(self.core.store.mailboxes(caller.scope(), only, after, limit).await?)
    }
}
