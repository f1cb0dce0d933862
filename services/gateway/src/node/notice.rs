//! What agents' sockets are told besides their deliveries. It is best-effort, but for the outcomes of what they have
//! invoked: a caller that one did not reach is told it later.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use relay_domain::{
    AgentId, InvocationId, WorkspaceScope,
    event::{ACTION_COMPLETED, ACTION_FAILED},
};
use relay_engine::{Engine, EngineResult, actions::outcome_event_id, hints::Hint};

use super::registry::{Event, Maps, Registry, ServedBy};

/// How often it is looked for outcomes that callers have missed. Until the next look it has been noted what this one
/// had them told.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// An outcome that was missed is found so long after it: before, the note that it was told may be on its way.
const FOUND_AFTER: Duration = Duration::from_secs(3);
/// So long after it, every clock shows that it has happened: what is not found then is not missed.
const SURE_AFTER: Duration = Duration::from_secs(15);
/// Callers that one statement looks for.
const CALLERS: usize = 500;

/// A best-effort event for agents' sockets.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) topic: String,
    pub(super) event: String,
    pub(super) data: serde_json::Value,
    /// Present when it goes out as a `deliver` frame with seq 0 instead of a `context.update`.
    pub(super) event_id: Option<String>,
}

impl Notice {
    /// The invocation whose outcome it tells.
    pub(super) fn outcome(&self) -> Option<InvocationId> {
        let is_outcome = self.event == ACTION_COMPLETED || self.event == ACTION_FAILED;
        self.data["invocation_id"].as_str().filter(|_| is_outcome)?.parse().ok()
    }
}

/// When outcomes may have passed an agent by: the first time since it is known to have heard all, and the last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Missed {
    since: Instant,
    last: Instant,
}

impl Missed {
    pub(super) fn now() -> Self {
        let now = Instant::now();
        Self { since: now, last: now }
    }
}

impl ServedBy {
    fn may_have_missed(&mut self) {
        let now = Missed::now();
        self.missed = Some(Missed { since: self.missed.map_or(now.since, |missed| missed.since), ..now });
    }

    fn tell(&mut self, agent: AgentId, notice: &Arc<Notice>) {
        let told = self.handle.tell(Event::Notice { agents: vec![agent], notice: Arc::clone(notice) });
        if !told && notice.outcome().is_some() {
            self.may_have_missed();
        }
    }
}

impl Registry {
    /// A hint with something to tell agents.
    pub(super) fn obey_notify(&self, hint: &Hint) {
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
        let Maps { agents: served, direct, .. } = &mut *maps;
        let tell = |agent: &AgentId| {
            if let Some(served) = served.get_mut(&(scope, *agent)) {
                served.tell(*agent, &notice);
            }
        };
        match agents {
            Some(agents) => agents.iter().for_each(tell),
            None => direct.get_mut(&scope).into_iter().flat_map(|d| d.told_in(second)).for_each(tell),
        }
    }

    /// An outcome did not reach its caller's socket.
    pub(super) fn may_have_missed(&self, scope: WorkspaceScope, agent: AgentId) {
        if let Some(served) = self.maps().agents.get_mut(&(scope, agent)) {
            served.may_have_missed();
        }
    }

    /// Nobody knows which hints were lost.
    pub(super) fn all_may_have_missed(&self) {
        self.maps().agents.values_mut().for_each(ServedBy::may_have_missed);
    }

    /// Tells callers what they have missed: those that come back, and those that a notice did not reach.
    pub(super) async fn catch_callers_up(&self, engine: &Engine) {
        let mut link = engine.link();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if link.has_changed().unwrap_or(false) {
                link.mark_unchanged();
                self.all_may_have_missed();
            }
            if let Err(error) = self.catch_up(engine).await {
                tracing::debug!(error = &error as &dyn std::error::Error, "outcomes could not be looked for");
            }
        }
    }

    async fn catch_up(&self, engine: &Engine) -> EngineResult<()> {
        let asked = Instant::now();
        let is_due = |served: &ServedBy| served.missed.is_some_and(|missed| missed.since + FOUND_AFTER <= asked);
        let callers: Vec<_> = {
            let maps = self.maps();
            maps.agents.iter().filter(|(_, served)| is_due(served)).map(|(caller, _)| *caller).collect()
        };
        for some in callers.chunks(CALLERS) {
            let untold = engine.untold_outcomes(some).await?;
            let told: HashSet<_> = untold.iter().map(|notice| (notice.scope, notice.caller)).collect();
            // Who is told something is looked at again: it may not reach its socket, or not be all.
            for caller in some.iter().filter(|caller| !told.contains(*caller)) {
                if let Some(served) = self.maps().agents.get_mut(caller) {
                    served.missed = served.missed.filter(|missed| missed.last + SURE_AFTER > asked);
                }
            }
            for notice in untold {
                let told = Arc::new(Notice {
                    topic: "agent".to_owned(),
                    event: notice.kind.to_owned(),
                    data: notice.data,
                    event_id: Some(outcome_event_id(notice.invocation)),
                });
                if let Some(served) = self.maps().agents.get_mut(&(notice.scope, notice.caller)) {
                    served.tell(notice.caller, &told);
                }
            }
        }
        Ok(())
    }
}
