//! Silence check: compares the positions of streams and the locations of agents with storage. Live copies and hints are
//! at-most-once, so silence proves nothing.
//!
//! The change feed names the mailboxes and nodes that have changed since the last check, and only those are compared
//! (ADR 0052). [`UncheckedPlaces`] holds what a check may have missed: agents of providers that registered since, and
//! comparisons that failed. Everything is compared at the start, after a recovery, and every few minutes as a safety
//! net.

use std::{
    collections::{HashMap, HashSet},
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope, nodes::DIRECT_ID_PREFIX};
use relay_engine::{
    Engine,
    mailboxes::serving::{CHANGES_KEPT, FeedPosition, FeedRead, MailboxChange, MailboxPosition},
};
use tokio::time::Instant;

use super::registry::{AgentRoute, Event, FULL_CHECK_PAUSE, Handle, Maps, Registry};

/// Interval at which the change feed is read; shorter while NATS is unavailable.
const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(3);
const SILENCE_CHECK_INTERVAL_WITHOUT_NATS: Duration = Duration::from_millis(500);
/// Time that the live copies of what the feed names have to arrive, before a mailbox counts as behind. Those of a large
/// fan-out are under way for longer than those of a direct message, and to read them would double its cost.
const COPIES_WITHIN: Duration = Duration::from_millis(500);
/// Interval at which every mailbox and node is compared, whatever the change feed says.
const FULL_COMPARISON_INTERVAL: Duration = Duration::from_secs(180);
/// Silence checks per comparison of the connections with their providers.
const TAKEOVER_ROUNDS: u32 = 4;
/// Mailboxes per query.
pub(super) const MAILBOXES_PER_QUERY: usize = 1000;

/// Mailboxes and nodes that the next silence check compares.
#[derive(Debug, Default)]
pub(super) struct UncheckedPlaces {
    mailboxes: HashSet<(WorkspaceScope, AgentId)>,
    nodes: HashSet<(WorkspaceScope, NodeId)>,
}

/// Position of this gateway in the change feed.
#[derive(Debug, Default)]
struct FeedReader {
    position: Option<FeedPosition>,
    read_at: Option<Instant>,
    compared_all_at: Option<Instant>,
}

impl FeedReader {
    /// Returns whether the feed is to be read from the position. Otherwise everything is compared.
    fn is_current(&self, now: Instant) -> bool {
        // Half of the retention, since the clocks of processes and the pruning have their own pace.
        self.read_at.is_some_and(|at| now - at < CHANGES_KEPT / 2)
            && self.compared_all_at.is_some_and(|at| now - at < FULL_COMPARISON_INTERVAL)
    }
}

impl Registry {
    /// Compares what has changed periodically.
    pub(super) async fn run_silence_checks(&self, engine: &Engine, gateway: GatewayId) {
        let mut link = engine.mailboxes().watch_link();
        let mut feed = FeedReader::default();
        let mut round = 0_u32;
        loop {
            let up = link.borrow_and_update().is_up;
            let checked_at = Instant::now();
            self.check_changes(engine, &mut feed, if up { COPIES_WITHIN } else { Duration::ZERO }).await;
            if round.is_multiple_of(TAKEOVER_ROUNDS) {
                let asked = Instant::now();
                // Finds take-overs whose hint was lost.
                match engine.processes().held_connections(gateway).await {
                    Ok(held) => self.close_lost_connections(engine, asked, &held).await,
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

    async fn check_changes(&self, engine: &Engine, feed: &mut FeedReader, copies_within: Duration) {
        let now = Instant::now();
        let read = match feed.position.as_ref().filter(|_| feed.is_current(now)) {
            Some(position) => engine.mailboxes().changes_since(position).await,
            None => engine.mailboxes().feed_position().await.map(|position| FeedRead::Everything { position }),
        };
        match read {
            Ok(FeedRead::Changes { changes, position }) => {
                // Moved on before the changes are applied: a comparison that fails is repeated as an unchecked place.
                (feed.position, feed.read_at) = (Some(position), Some(now));
                let is_written = |change: &MailboxChange| matches!(change, MailboxChange::Written(_));
                let (written, others): (Vec<_>, Vec<_>) = changes.into_iter().partition(is_written);
                // Moves do not wait: unlike for a written row, no live copy can follow that makes the read needless.
                self.apply_changes(&others);
                if !written.is_empty() {
                    tokio::time::sleep(copies_within).await;
                    self.apply_changes(&written);
                }
                self.compare_unchecked(engine).await;
            }
            // The position was read first, so what commits meanwhile is read next time.
            Ok(FeedRead::Everything { position }) => {
                *feed = FeedReader { position: Some(position), read_at: Some(now), compared_all_at: Some(now) };
                self.compare_all_mailboxes(engine).await;
                let nodes: Vec<_> = self.maps().nodes.keys().cloned().collect();
                self.compare_nodes(engine, &nodes).await;
            }
            // The next read covers this one's time too.
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "change feed not read, retrying");
            }
        }
    }

    pub(super) async fn compare_all_mailboxes(&self, engine: &Engine) {
        let keys: Vec<_> = self.maps().agents.keys().copied().collect();
        for slice in keys.chunks(MAILBOXES_PER_QUERY) {
            self.compare_mailboxes(engine, slice).await;
        }
    }

    async fn compare_unchecked(&self, engine: &Engine) {
        let UncheckedPlaces { mailboxes, nodes } = std::mem::take(&mut *self.unchecked());
        let mailboxes: Vec<_> = mailboxes.into_iter().collect();
        for slice in mailboxes.chunks(MAILBOXES_PER_QUERY) {
            self.compare_mailboxes(engine, slice).await;
        }
        let nodes: Vec<_> = nodes.into_iter().collect();
        self.compare_nodes(engine, &nodes).await;
    }

    /// Adds the mailboxes that are behind to the unchecked ones, and has connections list their agents that came.
    fn apply_changes(&self, changes: &[MailboxChange]) {
        let maps = self.maps();
        let mut behind = Vec::new();
        let mut listing: HashMap<u64, (WorkspaceScope, &NodeId)> = HashMap::new();
        for change in changes {
            match change {
                MailboxChange::Written(mailboxes) => {
                    let is_behind = |served: &AgentRoute, next| served.next.load(Ordering::Relaxed) < next;
                    let keys = mailboxes.iter().map(|(scope, agent, next)| ((*scope, *agent), *next));
                    let keys = keys.filter(|(key, next)| maps.agents.get(key).is_some_and(|s| is_behind(s, *next)));
                    behind.extend(keys.map(|(key, _)| key));
                }
                MailboxChange::Moved { scope, agent_id, node_id, provider } => {
                    let served = maps.agents.get(&(*scope, *agent_id));
                    let is_here = |served: &AgentRoute| {
                        served.node_id == *node_id && provider.as_ref().is_none_or(|name| *name == served.provider)
                    };
                    // Served here already, as after its own registration.
                    if served.is_some_and(is_here) {
                        continue;
                    }
                    // The comparison shows the former connection that it serves the agent no longer.
                    behind.extend(served.map(|_| (*scope, *agent_id)));
                    let peers = peers_of(&maps, *scope, node_id);
                    let hosts = peers.filter(|(_, name)| provider.as_ref().is_none_or(|provider| *name == provider));
                    listing.extend(hosts.map(|(id, _)| (id, (*scope, node_id))));
                }
                MailboxChange::ProviderChanged { scope, node_id, provider } => {
                    // Unassigned agents of the node may have come to its other providers, or left them.
                    let others = peers_of(&maps, *scope, node_id).filter(|(_, name)| *name != provider);
                    listing.extend(others.map(|(id, _)| (id, (*scope, node_id))));
                }
            }
        }
        let handles = listing.iter().filter_map(|(id, node)| Some((maps.peers.get(id)?.handle.clone(), *node)));
        let handles: Vec<_> = handles.collect();
        drop(maps);
        self.check_mailboxes_later(behind);
        for (handle, (scope, node)) in handles {
            // The record is not read again, so a full queue must not lose the move.
            if !handle.try_send(Event::Relist) {
                self.check_node_later(scope, node);
            }
        }
    }

    /// Finds agents that moved to a node without a hint.
    async fn compare_nodes(&self, engine: &Engine, nodes: &[(WorkspaceScope, NodeId)]) {
        for slice in nodes.chunks(MAILBOXES_PER_QUERY) {
            let located = match engine.mailboxes().agents_on_nodes(slice).await {
                Ok(located) => located,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "node check failed, retrying");
                    slice.iter().for_each(|(scope, node)| self.check_node_later(*scope, node));
                    continue;
                }
            };
            let maps = self.maps();
            let unserved = located.iter().filter(|agent| !maps.agents.contains_key(&(agent.scope, agent.agent_id)));
            let mut refused = Vec::new();
            for agent in unserved {
                let peers = peers_of(&maps, agent.scope, &agent.node_id);
                for (id, _) in peers.filter(|(_, name)| agent.provider.as_ref().is_none_or(|own| own == *name)) {
                    if maps.peers.get(&id).is_some_and(|peer| !peer.handle.try_send(Event::Relist)) {
                        refused.push((agent.scope, &agent.node_id));
                    }
                }
            }
            drop(maps);
            refused.into_iter().for_each(|(scope, node)| self.check_node_later(scope, node));
        }
    }

    /// Reads positions of mailboxes and sends the changed ones to their connections.
    pub(super) async fn compare_mailboxes(&self, engine: &Engine, keys: &[(WorkspaceScope, AgentId)]) {
        let positions = match engine.mailboxes().positions(keys).await {
            Ok(positions) => positions,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "mailbox check failed, retrying");
                self.check_mailboxes_later(keys.iter().copied());
                return;
            }
        };
        let mut changed: HashMap<u64, (Handle, Vec<MailboxPosition>)> = HashMap::new();
        {
            let maps = self.maps();
            for position in positions {
                // Unrouted during the read: its next route is compared again.
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
            let keys: Vec<_> = positions.iter().map(|position| (position.scope, position.agent_id)).collect();
            if !handle.try_send(Event::Positions(positions)) {
                self.check_mailboxes_later(keys);
            }
        }
    }

    fn unchecked(&self) -> MutexGuard<'_, UncheckedPlaces> {
        self.unchecked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the next silence check compare these mailboxes.
    pub(super) fn check_mailboxes_later(&self, keys: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        self.unchecked().mailboxes.extend(keys);
    }

    /// Has the next silence check compare the agents of a node. A direct node has one, which is routed.
    pub(super) fn check_node_later(&self, scope: WorkspaceScope, node: &NodeId) {
        if !node.as_str().starts_with(DIRECT_ID_PREFIX) {
            self.unchecked().nodes.insert((scope, node.clone()));
        }
    }
}

/// Registered connections of a node, with their providers.
fn peers_of<'a>(maps: &'a Maps, scope: WorkspaceScope, node: &NodeId) -> impl Iterator<Item = (u64, &'a ProviderName)> {
    let ids = maps.nodes.get(&(scope, node.clone())).into_iter().flatten();
    ids.filter_map(|id| Some((*id, &maps.peers.get(id)?.fence.as_ref()?.provider)))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicI64};

    use relay_domain::{WorkspaceId, access::token::TokenHash};
    use relay_engine::mailboxes::serving::Fence;

    use super::*;
    use crate::node::queue::Receiver;

    fn scope() -> WorkspaceScope {
        WorkspaceScope::from_engine_row(WorkspaceId::new(1))
    }

    fn connect(registry: &Registry, node: &str, provider: &str) -> (Handle, Fence, Receiver<Event>) {
        let (node_id, provider) = (NodeId::new(node), ProviderName::new(provider));
        let fence = Fence { scope: scope(), node_id, provider, epoch: 1 };
        let (handle, inbox) = registry.add_peer(scope(), &fence.node_id, TokenHash::from_token("nt_live_x"));
        registry.bind_peer(&handle, &fence);
        (handle, fence, inbox.events)
    }

    /// Applies changes. Returns the agents to compare, and whether each connection is to list its agents.
    fn apply(
        registry: &Registry,
        changes: &[MailboxChange],
        inboxes: &mut [&mut Receiver<Event>],
    ) -> (Vec<i64>, Vec<bool>) {
        *registry.unchecked() = UncheckedPlaces::default();
        registry.apply_changes(changes);
        let mut behind: Vec<i64> = registry.unchecked().mailboxes.iter().map(|(_, agent)| agent.get()).collect();
        behind.sort_unstable();
        let lists = inboxes.iter_mut().map(|inbox| matches!(inbox.try_recv(), Some(Event::Relist)));
        (behind, lists.collect())
    }

    #[test]
    fn only_mailboxes_that_are_behind_are_compared() {
        let registry = Registry::default();
        let (handle, fence, mut inbox) = connect(&registry, "n", "p");
        for (agent, next) in [(1, 5), (2, 5)] {
            registry.route_agent(&handle, &fence, AgentId::new(agent), &Arc::new(AtomicI64::new(next)));
        }
        let heads = [(1, 5), (2, 6), (3, 9)].map(|(agent, next)| (scope(), AgentId::new(agent), next));
        let written = MailboxChange::Written(heads.to_vec());
        assert_eq!(apply(&registry, &[written], &mut [&mut inbox]), (vec![2], vec![false]));
    }

    #[test]
    fn moves_reach_the_connections_that_they_concern() {
        let registry = Registry::default();
        let (handle, fence, mut old) = connect(&registry, "n", "p");
        let (_, _, mut other) = connect(&registry, "n", "q");
        let (_, _, mut elsewhere) = connect(&registry, "m", "p");
        registry.route_agent(&handle, &fence, AgentId::new(1), &Arc::default());
        let mut inboxes = [&mut old, &mut other, &mut elsewhere];
        let moved = |agent, node: &str, provider: Option<&str>| MailboxChange::Moved {
            scope: scope(),
            agent_id: AgentId::new(agent),
            node_id: NodeId::new(node),
            provider: provider.map(ProviderName::new),
        };
        for (change, behind, lists) in [
            (moved(1, "n", Some("p")), vec![], [false, false, false]),
            (moved(1, "n", None), vec![], [false, false, false]),
            (moved(1, "n", Some("q")), vec![1], [false, true, false]),
            (moved(1, "m", None), vec![1], [false, false, true]),
            (moved(2, "n", None), vec![], [true, true, false]),
            (moved(2, "unknown", None), vec![], [false, false, false]),
            (
                MailboxChange::ProviderChanged {
                    scope: scope(),
                    node_id: NodeId::new("n"),
                    provider: ProviderName::new("q"),
                },
                vec![],
                [true, false, false],
            ),
        ] {
            assert_eq!(
                apply(&registry, std::slice::from_ref(&change), &mut inboxes),
                (behind, lists.to_vec()),
                "{change:?}"
            );
        }
    }

    #[test]
    fn a_position_is_used_until_a_comparison_is_due_or_its_records_are_pruned() {
        let now = Instant::now();
        let mut feed = FeedReader::default();
        assert!(!feed.is_current(now), "everything is compared first");
        feed.compared_all_at = Some(now);
        feed.read_at = Some(now);
        assert!(feed.is_current(now + SILENCE_CHECK_INTERVAL));
        assert!(!feed.is_current(now + FULL_COMPARISON_INTERVAL));
        feed.compared_all_at = Some(now + CHANGES_KEPT);
        assert!(!feed.is_current(now + CHANGES_KEPT), "the last read is too old");
    }
}
