//! Liveness probes from other gateways, which ask whether the peer of a connection still answers before they take its
//! provider over.

use relay_domain::{GatewayId, WorkspaceScope, nodes::takeover::ProbeOutcome};
use relay_engine::Engine;
use relay_tasks::spawn_isolated;
use tokio::sync::oneshot;

use super::registry::{Event, LEASE_RENEW_INTERVAL, Registry};

impl Registry {
    /// Answers probes by letting the probed connections prove that their peers are alive.
    pub(super) async fn answer_probes(&self, engine: &Engine, gateway: GatewayId) {
        let mut probes = loop {
            match engine.nodes().probes(gateway).await {
                Ok(probes) => break probes,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "liveness probes unavailable, retrying");
                    tokio::time::sleep(LEASE_RENEW_INTERVAL).await;
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
                    // Without a match, without room and at the end of the connection, `prove` is dropped: silence.
                    peer.handle.try_send(Event::ProveLiveness(prove));
                }
            }
            // A task for each probe: a peer may take a second to answer, and other probes must not wait for it.
            let engine = engine.clone();
            spawn_isolated("probe", async move {
                // A connection that ends without an answer is silent.
                let proof = proof.await.unwrap_or(ProbeOutcome::Silent);
                engine.nodes().answer_probe(reply, proof).await;
            });
        }
    }
}
