//! Closing the sockets of suspended workspaces and drained nodes.

use relay_engine::Engine;

use super::Registry;

/// Clients come back after this code, later each time.
const TRY_AGAIN_LATER: u16 = 1013;

impl Registry {
    /// Closes the sockets of whoever is kept out, now and whenever that changes.
    pub(super) async fn close_kept_out(&self, engine: &Engine) {
        let mut changes = engine.holds_changed();
        loop {
            changes.mark_unchanged();
            {
                let maps = self.maps();
                for (_, ids) in maps.nodes.iter().filter(|((scope, node), _)| engine.is_held(*scope, node)) {
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
