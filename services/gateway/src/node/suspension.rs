//! Closes the sockets of suspended workspaces and drained nodes.

use relay_engine::Engine;

use super::Registry;

/// Close code and reason. Clients reconnect after this code, with increasing delays.
pub(super) const SUSPENDED_OR_DRAINED: (u16, &str) = (1013, "suspended or drained");

impl Registry {
    /// Closes the sockets of suspended workspaces and drained nodes, now and after every change.
    pub(super) async fn close_suspended_and_drained(&self, engine: &Engine) {
        let mut changes = engine.suspensions().subscribe();
        loop {
            // Before the walk, so that a change during it causes another one. A socket that enters the maps after the
            // walk is closed by the check of its token before its registration.
            changes.mark_unchanged();
            {
                let maps = self.maps();
                for (_, ids) in maps
                    .nodes
                    .iter()
                    .filter(|((scope, node), _)| engine.suspensions().is_suspended_or_drained(*scope, node))
                {
                    for peer in ids.iter().filter_map(|id| maps.peers.get(id)) {
                        let (code, reason) = SUSPENDED_OR_DRAINED;
                        peer.handle.close(code, reason);
                    }
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}
