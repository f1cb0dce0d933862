//! Live copies of deliveries: from the subject of this gateway to the connections of their recipients.

use std::collections::BTreeMap;

use relay_domain::{AgentId, GatewayId, NodeId, WorkspaceScope, metric_names};
use relay_engine::{
    Engine,
    mailboxes::serving::{LiveCopy, LiveFrame},
};
use tokio_util::sync::CancellationToken;

use super::registry::{Handle, LEASE_RENEW_INTERVAL, Maps, Registry};

impl Registry {
    /// Passes live copies on until `stop`. A task of its own: every delivery waits for it.
    pub async fn run_live_copies(self, engine: Engine, gateway: GatewayId, stop: CancellationToken) {
        let _ = stop.run_until_cancelled(self.receive_copies(&engine, gateway)).await;
    }

    async fn receive_copies(&self, engine: &Engine, gateway: GatewayId) {
        let mut copies = loop {
            match engine.mailboxes().live_copies(gateway).await {
                Ok(copies) => break copies,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "live copies unavailable, retrying");
                    tokio::time::sleep(LEASE_RENEW_INTERVAL).await;
                }
            }
        };
        // Ends only with the NATS client. The end of this task then stops the process, which could deliver only late.
        while let Some(copies) = copies.next().await {
            let unrouted = self.route_copies(copies);
            if !unrouted.is_empty() {
                // To all gateways: the agent may be served by another one by now, or in a moment by this one.
                engine.hints().mailboxes_changed(unrouted);
            }
        }
    }

    /// Passes copies on to the connections of their recipients. Returns the mailboxes that have none here: their agents
    /// have moved since the commit, or are being adopted.
    fn route_copies(&self, copies: Vec<(WorkspaceScope, AgentId, LiveCopy)>) -> Vec<(WorkspaceScope, AgentId)> {
        let (mut routed, mut unverified, mut unrouted) = (BTreeMap::<u64, RoutedCopies>::new(), Vec::new(), Vec::new());
        let maps = self.maps();
        for (scope, agent, copy) in copies {
            // Without a valid code nothing in the message is believed (ADR 0033): the mailbox is compared, if it is
            // served here.
            let LiveCopy::Frame(frame) = copy else {
                unverified.extend(maps.agents.contains_key(&(scope, agent)).then_some((scope, agent)));
                continue;
            };
            let handles = maps.serving_connections(scope, agent, &frame.location);
            let mut add = |handle: &Handle, frame| {
                let routed = routed.entry(handle.id).or_insert_with(|| (handle.clone(), scope, Vec::new()));
                routed.2.push((agent, frame));
            };
            // Nearly always one connection, which takes the frame without a clone.
            match handles.split_last() {
                Some((last, others)) => {
                    others.iter().for_each(|handle| add(handle, frame.clone()));
                    add(last, frame);
                }
                None => unrouted.push((scope, agent)),
            }
        }
        // Before the queues are filled: every route of this gateway waits for this lock.
        drop(maps);
        for (handle, scope, copies) in routed.into_values() {
            let agents: Vec<_> = copies.iter().map(|(agent, _)| (scope, *agent)).collect();
            if !handle.copies.try_send(copies) {
                metrics::counter!(metric_names::LIVE_COPIES_DROPPED).increment(agents.len() as u64);
                // Not at once, because positions are handled before the copies that still wait.
                self.compare_later(agents);
            }
        }
        if !unverified.is_empty() {
            self.compare_soon(unverified);
        }
        unrouted
    }
}

/// Copies for one connection, and the workspace of their agents.
type RoutedCopies = (Handle, WorkspaceScope, Vec<(AgentId, LiveFrame)>);

impl Maps {
    /// Connections that serve an agent with this location: the one that it is routed to or, without an assigned
    /// provider or without a route yet, all of its node. A connection keeps no copies for agents that it does not
    /// serve.
    fn serving_connections(&self, scope: WorkspaceScope, agent: AgentId, location: &str) -> Vec<&Handle> {
        // Ids of nodes may contain `/`.
        let Some((node, provider)) = location.rsplit_once('/') else { return Vec::new() };
        match self.agents.get(&(scope, agent)) {
            Some(route) if !provider.is_empty() => vec![&route.handle],
            _ => {
                let ids = self.nodes.get(&(scope, NodeId::new(node))).into_iter().flatten();
                ids.filter_map(|id| self.peers.get(id)).map(|peer| &peer.handle).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, atomic::AtomicI64},
        time::Duration,
    };

    use relay_domain::{ProviderName, WorkspaceId, access::token::TokenHash};
    use relay_engine::mailboxes::serving::{Fence, LiveFrame};

    use super::*;
    use crate::node::registry::Inbox;

    fn copy(location: &str) -> LiveCopy {
        LiveCopy::Frame(LiveFrame {
            seq: 1,
            delivery_id: "dlv_1_1".to_owned(),
            location: location.to_owned(),
            body: None,
            traceparent: None,
            epoch: None,
            expires_at_ms: None,
        })
    }

    #[test]
    fn copies_reach_the_connections_that_serve_their_agents_and_others_are_returned() {
        let registry = Registry::default();
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let (node_id, provider) = (NodeId::new("team/n"), ProviderName::new("p"));
        let fence = Fence { scope, node_id: node_id.clone(), provider, epoch: 1 };
        let (handle, mut inbox) = registry.add_peer(scope, &node_id, TokenHash::from_token("nt_live_x"));
        let (_other, mut other_inbox) = registry.add_peer(scope, &node_id, TokenHash::from_token("nt_live_y"));
        registry.bind_peer(&handle, &fence);
        let [served, unassigned, adopted, moved, gone] = [1, 2, 3, 4, 5].map(AgentId::new);
        registry.route_agent(&handle, &fence, served, &Arc::new(AtomicI64::new(1)));
        let unverified = vec![(scope, served, LiveCopy::WakeUp), (scope, gone, LiveCopy::WakeUp)];
        assert!(registry.route_copies(unverified).is_empty());
        assert_eq!(registry.take_due_comparisons(), [(scope, served)]);
        assert!(inbox.copies.try_recv().is_none());
        let sent = vec![
            (scope, served, copy("team/n/p")),
            (scope, unassigned, copy("team/n/")),
            (scope, adopted, copy("team/n/p")),
            (scope, moved, copy("elsewhere/p")),
            (scope, gone, copy("elsewhere/")),
        ];
        assert_eq!(registry.route_copies(sent), [(scope, moved), (scope, gone)]);
        let received = |inbox: &mut Inbox| -> Vec<AgentId> {
            inbox.copies.try_recv().unwrap_or_default().into_iter().map(|(agent, _)| agent).collect()
        };
        assert_eq!(received(&mut inbox), [served, unassigned, adopted]);
        assert_eq!(received(&mut other_inbox), [unassigned, adopted]);
        assert!(received(&mut inbox).is_empty() && registry.take_due_comparisons().is_empty());
    }

    #[test]
    fn copies_beyond_the_queue_of_a_connection_have_their_mailboxes_compared() {
        let registry = Registry::default();
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let fence = Fence { scope, node_id: NodeId::new("n"), provider: ProviderName::new("p"), epoch: 1 };
        let (handle, _inbox) = registry.add_peer(scope, &fence.node_id, TokenHash::from_token("nt_live_x"));
        registry.bind_peer(&handle, &fence);
        let agent = AgentId::new(1);
        registry.route_agent(&handle, &fence, agent, &Arc::new(AtomicI64::new(1)));
        // Those of one message take one place.
        assert!(registry.route_copies(vec![(scope, agent, copy("n/p")); 1000]).is_empty());
        assert!(registry.take_due_comparisons().is_empty());
        for _ in 0..1000 {
            assert!(registry.route_copies(vec![(scope, agent, copy("n/p"))]).is_empty());
        }
        assert_eq!(registry.take_delayed_comparisons(), [(scope, agent)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_route_is_compared_once_after_commits_that_were_under_way() {
        let registry = Registry::default();
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let fence = Fence { scope, node_id: NodeId::new("n"), provider: ProviderName::new("p"), epoch: 1 };
        let (handle, _inbox) = registry.add_peer(scope, &fence.node_id, TokenHash::from_token("nt_live_x"));
        registry.bind_peer(&handle, &fence);
        let comparing = registry.compare_delayed_mailboxes();
        let within = |time| tokio::time::timeout(time, std::future::pending::<()>());
        tokio::pin!(comparing);
        let mut compared_after = async |registry: &Registry, millis| {
            tokio::select! {
                () = &mut comparing => {}
                _ = within(Duration::from_millis(millis)) => {}
            }
            registry.take_due_comparisons()
        };
        let [first, second] = [1, 2].map(AgentId::new);
        registry.route_agent(&handle, &fence, first, &Arc::new(AtomicI64::new(1)));
        assert!(compared_after(&registry, 200).await.is_empty());
        registry.route_agent(&handle, &fence, second, &Arc::new(AtomicI64::new(1)));
        assert_eq!(compared_after(&registry, 200).await, [(scope, first)]);
        assert_eq!(compared_after(&registry, 400).await, [(scope, second)]);
        assert!(compared_after(&registry, 5000).await.is_empty());
    }
}
