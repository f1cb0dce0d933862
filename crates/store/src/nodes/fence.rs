//! Identity of a provider ([`ProviderKey`]) and of the connection that holds it ([`Fence`]).

use relay_domain::{NodeId, ProviderName, WorkspaceScope};

/// Claim of a connection on its provider. Writes repeat the epoch in their condition, so a superseded connection
/// changes nothing.
#[derive(Debug, Clone)]
pub struct Fence {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Epoch of the connection.
    pub epoch: i64,
}

impl Fence {
    pub(crate) const fn key(&self) -> ProviderKey<'_> {
        ProviderKey { scope: self.scope, node: &self.node_id, provider: &self.provider }
    }
}

/// Identity of a provider, whatever connection holds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProviderKey<'a> {
    pub(crate) scope: WorkspaceScope,
    pub(crate) node: &'a NodeId,
    pub(crate) provider: &'a ProviderName,
}
