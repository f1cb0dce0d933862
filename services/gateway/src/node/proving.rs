//! Questions of other gateways, whether the peer of a connection lives.

use relay_domain::{GatewayId, WorkspaceScope, takeover::Proof};
use relay_engine::Engine;
use tokio::sync::oneshot;

use super::registry::{Event, RENEW_EVERY, Registry};

impl Registry {
    /// Lets the connections that others ask about prove that their peers live.
    pub(super) async fn answer_probes(&self, engine: &Engine, gateway: GatewayId) {
        let mut probes = loop {
            match engine.probes(gateway).await {
                Ok(probes) => break probes,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "waiting for nats to be probed");
                    tokio::time::sleep(RENEW_EVERY).await;
                }
            }
        };
        while let Some((request, reply)) = probes.next().await {
            let (prove, proof) = oneshot::channel();
            {
                let maps = self.maps();
                let scope = WorkspaceScope::from_engine_row(request.workspace);
                let ids = maps.nodes.get(&(scope, request.node.clone())).into_iter().flatten();
                let peer = ids.filter_map(|id| maps.peers.get(id)).find(|peer| {
                    peer.fence.as_ref().is_some_and(|f| f.provider == request.provider && f.epoch == request.epoch)
                });
                if let Some(peer) = peer {
                    peer.handle.tell(Event::Prove(prove));
                }
            }
            let engine = engine.clone();
            tokio::spawn(async move {
                let proof = proof.await.unwrap_or(Proof::Silent);
                engine.answer_probe(reply, proof).await;
            });
        }
    }
}
