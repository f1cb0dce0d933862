//! Looking for invocations that no hint has brought: those not yet written to this gateway's sockets, and those that
//! were written to a connection that is gone.

use std::{sync::Arc, time::Duration};

use relay_domain::{GatewayId, InvocationId, WorkspaceScope, action::RESEND_GRACE};
use relay_engine::{Engine, EngineResult, actions::InvokeFrame, hints::Hint, mailbox::Fence};

use super::registry::{Event, Handle, Peer, Registry};

/// How often everything is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A look that a hint has asked for waits so long for others.
const GATHER: Duration = Duration::from_millis(2);
/// Connections that one statement looks back for.
const CONNECTIONS: usize = 500;

impl Registry {
    /// Looks for unwritten invocations, each second and when a hint says so.
    pub(super) async fn look_for_invocations(&self, engine: &Engine, gateway: GatewayId) {
        loop {
            let asked = tokio::time::timeout(LOOK_EVERY, self.invocation_news.notified()).await;
            if asked.is_ok() {
                tokio::time::sleep(GATHER).await;
            }
            if let Err(error) = self.look_once(engine, gateway).await {
                tracing::debug!(error = &error as &dyn std::error::Error, "invocations could not be looked for");
            }
        }
    }

    async fn look_once(&self, engine: &Engine, gateway: GatewayId) -> EngineResult<()> {
        for frame in engine.unsent_invocations(gateway).await? {
            self.invoke(Arc::new(frame));
        }
        let registered_before = |peer: &Peer| peer.bound_at.elapsed() >= RESEND_GRACE;
        // What the connection before was sent may have been lost with it. Its result had time to arrive.
        let to_look_back = self.peers(|peer| registered_before(peer) && !peer.looked_back);
        for some in to_look_back.chunks(CONNECTIONS) {
            let fences: Vec<Fence> = some.iter().map(|(_, fence)| fence.clone()).collect();
            let frames = engine.invocations_sent_before(&fences).await?;
            // What did not fit into a connection's queue, or into this look, is left for the next.
            let is_through = |fence: &Fence| {
                !frames.iter().any(|frame| {
                    frame.scope == fence.scope && frame.node_id == fence.node_id && frame.provider == fence.provider
                })
            };
            self.mark(some.iter().filter(|(_, fence)| is_through(fence)), |peer| peer.looked_back = true);
            frames.into_iter().for_each(|frame| self.invoke(Arc::new(frame)));
        }
        Ok(())
    }

    /// A hint about an invocation: with its frame, or to look for it.
    pub(super) fn obey_invoke(&self, hint: &Hint) {
        let Hint::Invoke { workspace, node, provider, invocation, attempt, frame } = hint else { return };
        match frame {
            None => self.invocation_news.notify_one(),
            Some(text) => self.invoke(Arc::new(InvokeFrame {
                scope: WorkspaceScope::from_engine_row(*workspace),
                invocation: InvocationId::new(*invocation),
                attempt: *attempt,
                node_id: node.clone(),
                provider: provider.clone(),
                text: text.clone(),
            })),
        }
    }

    /// Passes an invocation to its provider's connection.
    fn invoke(&self, frame: Arc<InvokeFrame>) {
        let maps = self.maps();
        let ids = maps.nodes.get(&(frame.scope, frame.node_id.clone())).into_iter().flatten();
        let of_provider = |peer: &&Peer| peer.fence.as_ref().is_some_and(|fence| fence.provider == frame.provider);
        if let Some(peer) = ids.filter_map(|id| maps.peers.get(id)).find(of_provider) {
            peer.handle.tell(Event::Invoke(Arc::clone(&frame)));
        }
    }

    /// Connections that have registered, and that are meant.
    fn peers(&self, is_meant: impl Fn(&Peer) -> bool) -> Vec<(Handle, Fence)> {
        let maps = self.maps();
        let meant = maps.peers.values().filter(|peer| is_meant(peer));
        meant.filter_map(|peer| Some((peer.handle.clone(), peer.fence.clone()?))).collect()
    }

    /// Notes something of connections, unless they have registered anew.
    fn mark<'a>(&self, done: impl Iterator<Item = &'a (Handle, Fence)>, note: impl Fn(&mut Peer)) {
        let mut maps = self.maps();
        for (handle, fence) in done {
            let is_same = |known: &Fence| known.epoch == fence.epoch;
            if let Some(peer) = maps.peers.get_mut(&handle.id).filter(|peer| peer.fence.as_ref().is_some_and(is_same)) {
                note(peer);
            }
        }
    }
}
