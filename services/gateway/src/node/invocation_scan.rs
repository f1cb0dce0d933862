//! Scan for invocations that no hint has delivered: those not yet written to this gateway's sockets, and those written
//! to a connection that has ended since.
//!
//! Methods of [`Registry`]: one loop, and the handler of invocation hints.

use std::{sync::Arc, time::Duration};

use relay_domain::{GatewayId, InvocationId, WorkspaceScope, actions::RESEND_GRACE};
use relay_engine::{
    Engine, EngineResult, actions::InvokeFrame, due_work::WorkKind, hints::Hint, mailboxes::serving::Fence,
};
use tokio::time::Instant;

use super::registry::{Event, Handle, Peer, Registry};

/// Interval of the complete scan.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Delay of a scan that a hint has requested, so that one scan serves several hints.
const HINT_BATCH_WINDOW: Duration = Duration::from_millis(2);
/// Connections per query for invocations sent earlier.
const CONNECTIONS_PER_QUERY: usize = 500;

impl Registry {
    /// Scans for unsent invocations after each hint, and every second while there are any.
    pub(super) async fn scan_invocations(&self, engine: &Engine, gateway: GatewayId) {
        let mut unsent = engine.due_work().watch(WorkKind::UnsentInvocations, SCAN_INTERVAL);
        let mut scanned_at = Instant::now();
        loop {
            // `wait` returns at once while the last read of due work has found some, so the pause bounds the scans.
            let due = async {
                tokio::time::sleep_until(scanned_at + SCAN_INTERVAL).await;
                unsent.wait().await;
            };
            let has_unsent = tokio::select! {
                () = self.invocation_notify.notified() => {
                    tokio::time::sleep(HINT_BATCH_WINDOW).await;
                    true
                }
                () = due => true,
                // Without unsent invocations, those of earlier connections are still looked for.
                () = tokio::time::sleep(SCAN_INTERVAL) => false,
            };
            if has_unsent {
                scanned_at = Instant::now();
                if let Err(error) = self.forward_unsent(engine, gateway).await {
                    tracing::debug!(error = &error as &dyn std::error::Error, "invocation scan failed, retrying");
                }
            }
            if let Err(error) = self.resend_unanswered(engine).await {
                tracing::debug!(error = &error as &dyn std::error::Error, "invocations not sent again, retrying");
            }
        }
    }

    async fn forward_unsent(&self, engine: &Engine, gateway: GatewayId) -> EngineResult<()> {
        // Rows that were written and whose record still gathers come back here; the connection knows their attempts.
        for frame in engine.actions().unsent_invocations(gateway).await? {
            self.forward_invocation(Arc::new(frame));
        }
        Ok(())
    }

    async fn resend_unanswered(&self, engine: &Engine) -> EngineResult<()> {
        let registered_before = |peer: &Peer| peer.bound_at.elapsed() >= RESEND_GRACE;
        // Invocations written to the previous connection may be lost with it. Their results have had time to arrive.
        let to_look_back = self.registered_peers(|peer| registered_before(peer) && !peer.resent_invocations);
        for batch in to_look_back.chunks(CONNECTIONS_PER_QUERY) {
            let fences: Vec<Fence> = batch.iter().map(|(_, fence)| fence.clone()).collect();
            let frames = engine.actions().unanswered_invocations(&fences).await?;
            // Invocations that did not fit into a connection's queue or into this scan are left for the next one.
            let is_through = |fence: &Fence| {
                !frames.iter().any(|frame| {
                    frame.scope == fence.scope && frame.node_id == fence.node_id && frame.provider == fence.provider
                })
            };
            self.update_peers(batch.iter().filter(|(_, fence)| is_through(fence)), |peer| {
                peer.resent_invocations = true
            });
            frames.into_iter().for_each(|frame| self.forward_invocation(Arc::new(frame)));
        }
        Ok(())
    }

    /// Handles an invocation hint: forwards its frame, or triggers a scan if it carries none.
    pub(super) fn handle_invoke_hint(&self, hint: &Hint) {
        let Hint::Invoke { workspace, node, provider, invocation, attempt, frame } = hint else { return };
        match frame {
            None => self.invocation_notify.notify_one(),
            // The frame needs no check here: a hint without a valid code loses its frame on arrival (ADR 0033).
            Some(text) => self.forward_invocation(Arc::new(InvokeFrame {
                scope: WorkspaceScope::from_engine_row(*workspace),
                invocation: InvocationId::new(*invocation),
                attempt: *attempt,
                node_id: node.clone(),
                provider: provider.clone(),
                text: text.clone(),
            })),
        }
    }

    /// Forwards an invocation to its provider's connection: the newest one, since an older one that was superseded may
    /// not have ended yet.
    fn forward_invocation(&self, frame: Arc<InvokeFrame>) {
        let maps = self.maps();
        let ids = maps.nodes.get(&(frame.scope, frame.node_id.clone())).into_iter().flatten();
        let of_provider = |peer: &&Peer| peer.fence.as_ref().is_some_and(|fence| fence.provider == frame.provider);
        let epoch = |peer: &&Peer| peer.fence.as_ref().map(|fence| fence.epoch);
        if let Some(peer) = ids.filter_map(|id| maps.peers.get(id)).filter(of_provider).max_by_key(epoch) {
            // A frame that finds no room stays unsent in storage, where the next scan finds it.
            peer.handle.try_send(Event::Invoke(Arc::clone(&frame)));
        }
    }

    /// Returns the registered connections that match.
    fn registered_peers(&self, matches: impl Fn(&Peer) -> bool) -> Vec<(Handle, Fence)> {
        let maps = self.maps();
        let matching = maps.peers.values().filter(|peer| matches(peer));
        matching.filter_map(|peer| Some((peer.handle.clone(), peer.fence.clone()?))).collect()
    }

    /// Updates connections, except those that have registered again meanwhile.
    fn update_peers<'a>(&self, done: impl Iterator<Item = &'a (Handle, Fence)>, note: impl Fn(&mut Peer)) {
        let mut maps = self.maps();
        for (handle, fence) in done {
            let is_same = |known: &Fence| known.epoch == fence.epoch;
            if let Some(peer) = maps.peers.get_mut(&handle.id).filter(|peer| peer.fence.as_ref().is_some_and(is_same)) {
                note(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, ProviderName, WorkspaceId, access::token::TokenHash};

    use super::*;

    #[test]
    fn an_invocation_goes_to_the_newest_connection_of_its_provider() {
        let registry = Registry::default();
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let (node_id, provider) = (NodeId::new("n"), ProviderName::new("p"));
        let mut inboxes = [("p", 1), ("p", 3), ("p", 2), ("q", 4)].map(|(name, epoch)| {
            let (handle, inbox) = registry.add_peer(scope, &node_id, TokenHash::from_token("nt_live_x"));
            let fence = Fence { scope, node_id: node_id.clone(), provider: ProviderName::new(name), epoch };
            registry.bind_peer(&handle, &fence);
            inbox
        });
        let invocation = InvocationId::new(1);
        let frame = InvokeFrame { scope, invocation, attempt: 1, node_id, provider, text: "frame".to_owned() };
        registry.forward_invocation(Arc::new(frame));
        let reached = inboxes.each_mut().map(|inbox| matches!(inbox.events.try_recv(), Some(Event::Invoke(_))));
        assert_eq!(reached, [false, true, false, false]);
    }
}
