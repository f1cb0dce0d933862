//! Closes the sockets of suspended workspaces and drained nodes.

use relay_engine::Engine;

use super::Registry;

/// Clients reconnect after this code, with increasing delays.
const TRY_AGAIN_LATER: u16 = 1013;

impl Registry {
    /// Closes the sockets of suspended workspaces and drained nodes, now and after every change.
    pub(super) async fn close_suspended_and_drained(&self, engine: &Engine) {
        let mut changes = engine.suspensions().subscribe();
        loop {
            changes.mark_unchanged();
            {
                let maps = self.maps();
                for (_, ids) in maps
                    .nodes
                    .iter()
                    .filter(|((scope, node), _)| engine.suspensions().is_suspended_or_drained(*scope, node))
                {
                    for peer in ids.iter().filter_map(|id| maps.peers.get(id)) {
                        peer.handle.close(TRY_AGAIN_LATER, "suspended or drained");
                    }
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}
