//! Silence check: compares the positions of streams and the locations of agents with storage. Live copies and hints are
//! at-most-once, so silence proves nothing.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use relay_domain::{AgentId, GatewayId, WorkspaceScope};
use relay_engine::{Engine, mailboxes::serving::MailboxPosition};
use tokio::time::Instant;

use super::registry::{Event, FULL_CHECK_PAUSE, Handle, Registry};

/// Interval at which every stream is compared with its mailbox; shorter while NATS is unavailable.
const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(3);
const SILENCE_CHECK_INTERVAL_WITHOUT_NATS: Duration = Duration::from_millis(500);
/// Silence checks per comparison of the nodes' agents.
const RELIST_ROUNDS: u32 = 4;
/// Mailboxes per query.
pub(super) const MAILBOXES_PER_QUERY: usize = 1000;

impl Registry {
    /// Compares streams with mailboxes periodically.
    pub(super) async fn run_silence_checks(&self, engine: &Engine, gateway: GatewayId) {
        let mut link = engine.mailboxes().watch_link();
        let mut round = 0_u32;
        loop {
            let up = link.borrow_and_update().is_up;
            let checked_at = Instant::now();
            self.compare_all_mailboxes(engine).await;
            if round.is_multiple_of(RELIST_ROUNDS) {
                self.compare_nodes(engine).await;
                let asked = Instant::now();
                // Finds take-overs whose hint was lost.
                match engine.processes().held_connections(gateway).await {
                    Ok(held) => self.close_lost_connections(asked, &held),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "connection check failed, retrying");
                    }
                }
            }
            round = round.wrapping_add(1);
            let pause = if up { SILENCE_CHECK_INTERVAL } else { SILENCE_CHECK_INTERVAL_WITHOUT_NATS };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = link.changed() => {
                    // Every lost message is reported, and a check for each would add to the load that lost them.
                    if link.borrow().is_up == up {
                        tokio::time::sleep_until(checked_at + FULL_CHECK_PAUSE).await;
                    }
                }
            }
        }
    }

    pub(super) async fn compare_all_mailboxes(&self, engine: &Engine) {
        let keys: Vec<_> = self.maps().agents.keys().copied().collect();
        for slice in keys.chunks(MAILBOXES_PER_QUERY) {
            self.compare_mailboxes(engine, slice).await;
        }
    }

    /// Finds agents that moved to a node without a hint.
    async fn compare_nodes(&self, engine: &Engine) {
        let keys: Vec<_> = self.maps().nodes.keys().cloned().collect();
        for slice in keys.chunks(MAILBOXES_PER_QUERY) {
            let located = match engine.mailboxes().agents_on_nodes(slice).await {
                Ok(located) => located,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "node check failed, retrying");
                    return;
                }
            };
            let maps = self.maps();
            for agent in located.iter().filter(|a| !maps.agents.contains_key(&(a.scope, a.agent_id))) {
                let ids = maps.nodes.get(&(agent.scope, agent.node_id.clone())).into_iter().flatten();
                for peer in ids.filter_map(|id| maps.peers.get(id)) {
                    let provider = peer.fence.as_ref().map(|fence| &fence.provider);
                    if provider.is_some() && (agent.provider.is_none() || agent.provider.as_ref() == provider) {
                        peer.handle.try_send(Event::Relist);
                    }
                }
            }
        }
    }

    /// Reads positions of mailboxes and sends the changed ones to their connections.
    pub(super) async fn compare_mailboxes(&self, engine: &Engine, keys: &[(WorkspaceScope, AgentId)]) {
        let positions = match engine.mailboxes().positions(keys).await {
            Ok(positions) => positions,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "mailbox check failed, retrying");
                return;
            }
        };
        let mut changed: HashMap<u64, (Handle, Vec<MailboxPosition>)> = HashMap::new();
        {
            let maps = self.maps();
            for position in positions {
                let Some(served) = maps.agents.get(&(position.scope, position.agent_id)) else { continue };
                let here = position.node_id == served.node_id
                    && position.provider.as_ref().is_none_or(|provider| *provider == served.provider);
                if !here || served.next.load(Ordering::Relaxed) != position.next_seq {
                    let entry = changed.entry(served.handle.id).or_insert_with(|| (served.handle.clone(), Vec::new()));
                    entry.1.push(position);
                }
            }
        }
        for (handle, positions) in changed.into_values() {
            handle.try_send(Event::Positions(positions));
        }
    }
}
