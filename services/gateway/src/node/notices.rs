//! Notices to agents' sockets. They are best-effort, except for outcomes of invocations: a caller that misses one
//! receives it later.
//!
//! `registry` calls the hint handler; `run_outcome_scans` resends missed outcomes.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use relay_domain::{
    AgentId, InvocationId, WorkspaceId, WorkspaceScope,
    events::kind::{ACTION_COMPLETED, ACTION_FAILED},
};
use relay_engine::{Engine, EngineResult, actions::outcome_event_id, hints::Hint};
use tokio::time::Instant;

use super::registry::{AgentRoute, Event, Maps, Registry};

/// Interval of the scan for missed outcomes. Within it the outcomes sent by one scan are recorded, so that the next
/// does not repeat them.
const SCAN_INTERVAL: Duration = Duration::from_secs(2);
/// Delay before a missed outcome is searched: until then the record that it was sent may be in progress.
const SEARCH_DELAY: Duration = Duration::from_secs(3);
/// After this time every clock agrees that the outcome has happened: an agent without results by then has missed
/// nothing.
const CERTAIN_AFTER: Duration = Duration::from_secs(15);
const CALLERS_PER_QUERY: usize = 500;

/// Best-effort event for agents' sockets.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) topic: String,
    pub(super) event: String,
    pub(super) data: serde_json::Value,
    /// If present, the notice is a `deliver` frame with seq 0 instead of a `context.update`.
    pub(super) event_id: Option<String>,
}

impl Notice {
    /// Returns whether a notice to the whole workspace also goes to providers that host agents: those about statuses
    /// and channels do.
    fn is_for_providers(&self) -> bool {
        self.topic == "presence" || self.topic == "channel"
    }

    /// Returns the invocation whose outcome the notice reports.
    pub(super) fn outcome_invocation(&self) -> Option<InvocationId> {
        let is_outcome = self.event == ACTION_COMPLETED || self.event == ACTION_FAILED;
        self.data["invocation_id"].as_str().filter(|_| is_outcome)?.parse().ok()
    }
}

/// Time range in which an agent may have missed outcomes: the first possible miss since the last complete scan, and
/// the latest.
#[derive(Debug, Clone, Copy)]
pub(super) struct MissedWindow {
    since: Instant,
    last: Instant,
}

impl MissedWindow {
    pub(super) fn starting_now() -> Self {
        let now = Instant::now();
        Self { since: now, last: now }
    }
}

/// Sends a `context.update` once to each connection that serves some of these agents.
fn send_once_per_connection(
    scope: WorkspaceScope,
    agents: &[AgentId],
    served: &HashMap<(WorkspaceScope, AgentId), AgentRoute>,
    notice: &Arc<Notice>,
) {
    let mut connections: HashMap<u64, (&AgentRoute, Vec<AgentId>)> = HashMap::new();
    for agent in agents {
        if let Some(route) = served.get(&(scope, *agent)) {
            connections.entry(route.handle.id).or_insert_with(|| (route, Vec::new())).1.push(*agent);
        }
    }
    for (route, agents) in connections.into_values() {
        // A refused one is lost. Outcomes are never sent here: they have an event id.
        route.handle.try_send(Event::Notice { agents, notice: Arc::clone(notice) });
    }
}

impl AgentRoute {
    fn mark_possibly_missed(&mut self) {
        let now = MissedWindow::starting_now();
        self.missed = Some(MissedWindow { since: self.missed.map_or(now.since, |missed| missed.since), ..now });
    }

    fn send_notice(&mut self, agent: AgentId, notice: &Arc<Notice>) {
        let sent = self.handle.try_send(Event::Notice { agents: vec![agent], notice: Arc::clone(notice) });
        if !sent && notice.outcome_invocation().is_some() {
            self.mark_possibly_missed();
        }
    }
}

impl Registry {
    /// Handles a notice hint.
    pub(super) fn handle_notify_hint(&self, hint: &Hint) {
        if let Hint::NotifyEach { workspace, agent, topic, event, each } = hint {
            return self.send_each(WorkspaceScope::from_engine_row(*workspace), *agent, (topic, event), each);
        }
        let Hint::Notify { workspace, agents, topic, event, data, event_id } = hint else { return };
        let scope = WorkspaceScope::from_engine_row(*workspace);
        let notice = Arc::new(Notice {
            topic: topic.clone(),
            event: event.clone(),
            data: data.clone(),
            event_id: event_id.clone(),
        });
        let second = self.elapsed_ms() / 1000;
        let mut maps = self.maps();
        let Maps { agents: served, direct, brokers, peers, .. } = &mut *maps;
        let send = |agent: &AgentId| {
            if let Some(served) = served.get_mut(&(scope, *agent)) {
                served.send_notice(*agent, &notice);
            }
        };
        match agents {
            // Without an event id it is a `context.update`, which names its agents: one frame for each connection is
            // enough.
            Some(agents) if notice.event_id.is_none() => send_once_per_connection(scope, agents, served, &notice),
            Some(agents) => agents.iter().for_each(send),
            None => {
                direct.get_mut(&scope).into_iter().flat_map(|d| d.recipients_in(second)).for_each(send);
                let connections = brokers.get(&scope).into_iter().flatten().filter(|_| notice.is_for_providers());
                for peer in connections.filter_map(|id| peers.get(id)) {
                    peer.handle.try_send(Event::WorkspaceNotice(Arc::clone(&notice)));
                }
            }
        }
    }

    /// Sends several events to the socket of one agent.
    fn send_each(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        (topic, event): (&str, &str),
        each: &[serde_json::Value],
    ) {
        let mut maps = self.maps();
        let Some(served) = maps.agents.get_mut(&(scope, agent)) else { return };
        for data in each {
            let (topic, event) = (topic.to_owned(), event.to_owned());
            served.send_notice(agent, &Arc::new(Notice { topic, event, data: data.clone(), event_id: None }));
        }
    }

    /// Handles a notice that could not be verified: storage is asked for the outcomes that it may have been about.
    pub(super) fn handle_missed_notice(&self, workspace: WorkspaceId, agents: Option<&[AgentId]>) {
        let scope = WorkspaceScope::from_engine_row(workspace);
        let mut maps = self.maps();
        // An outcome names its caller; a notice for all nodes of a workspace is never an outcome.
        for agent in agents.into_iter().flatten() {
            if let Some(served) = maps.agents.get_mut(&(scope, *agent)) {
                served.mark_possibly_missed();
            }
        }
    }

    /// Records that an outcome may not have reached its caller's socket.
    pub(super) fn mark_possibly_missed(&self, scope: WorkspaceScope, agent: AgentId) {
        if let Some(served) = self.maps().agents.get_mut(&(scope, agent)) {
            served.mark_possibly_missed();
        }
    }

    /// Marks all agents: the lost hints are unknown.
    pub(super) fn mark_all_possibly_missed(&self) {
        self.maps().agents.values_mut().for_each(AgentRoute::mark_possibly_missed);
    }

    /// Resends missed outcomes, to callers that reconnect and to those that a notice did not reach.
    pub(super) async fn run_outcome_scans(&self, engine: &Engine) {
        let mut link = engine.mailboxes().watch_link();
        loop {
            tokio::time::sleep(SCAN_INTERVAL).await;
            if link.has_changed().unwrap_or(false) {
                // A disconnect or a slow consumer: notices of other processes may be lost, and their callers are
                // unknown.
                link.mark_unchanged();
                self.mark_all_possibly_missed();
            }
            if let Err(error) = self.resend_missed_outcomes(engine).await {
                tracing::debug!(error = &error as &dyn std::error::Error, "outcome scan failed, retrying");
            }
        }
    }

    async fn resend_missed_outcomes(&self, engine: &Engine) -> EngineResult<()> {
        // Before the reads: a miss that is noted during one of them is later, and remains for the next scan.
        let asked = Instant::now();
        let is_due = |served: &AgentRoute| served.missed.is_some_and(|missed| missed.since + SEARCH_DELAY <= asked);
        let callers: Vec<_> = {
            let maps = self.maps();
            maps.agents.iter().filter(|(_, served)| is_due(served)).map(|(caller, _)| *caller).collect()
        };
        for batch in callers.chunks(CALLERS_PER_QUERY) {
            let unannounced = engine.actions().unannounced_outcomes(batch).await?;
            let with_results: HashSet<_> = unannounced.iter().map(|notice| (notice.scope, notice.caller)).collect();
            // Callers with results are scanned again: the notice may not reach the socket, or there may be more.
            for caller in batch.iter().filter(|caller| !with_results.contains(*caller)) {
                if let Some(served) = self.maps().agents.get_mut(caller) {
                    served.missed = served.missed.filter(|missed| missed.last + CERTAIN_AFTER > asked);
                }
            }
            for notice in unannounced {
                let outcome = Arc::new(Notice {
                    topic: "agent".to_owned(),
                    event: notice.kind.to_owned(),
                    data: notice.data,
                    event_id: Some(outcome_event_id(notice.invocation)),
                });
                if let Some(served) = self.maps().agents.get_mut(&(notice.scope, notice.caller)) {
                    served.send_notice(notice.caller, &outcome);
                }
            }
        }
        Ok(())
    }
}
