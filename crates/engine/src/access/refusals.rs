//! The bound on recorded refusals, so that they cannot flood the event log: one event a minute for each agent and code,
//! and [`MAX_RECORDED`] a minute for a workspace. Denied invocations (`action.denied`) have a bound of their own.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use moka::sync::Cache;
use relay_domain::{AgentId, WorkspaceId, access::rights::Refusal};
use tokio::time::Instant;

/// Events about refusals of one workspace in a minute, for each gateway.
const MAX_RECORDED: usize = 60;
/// Denied invocations of one agent that are recorded in a minute.
const MAX_DENIALS: usize = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Workspaces with refusals in the last minute; of others, the least used are forgotten.
const MAX_WORKSPACES: u64 = 10_000;

/// Refusals of one workspace that were recorded in its current minute.
#[derive(Debug)]
struct RefusalWindow {
    began: Instant,
    recorded: HashSet<(AgentId, Refusal)>,
    /// Denied invocations of each agent, and of all.
    denials: HashMap<AgentId, usize>,
    all_denials: usize,
}

impl RefusalWindow {
    fn begin() -> Self {
        Self { began: Instant::now(), recorded: HashSet::new(), denials: HashMap::new(), all_denials: 0 }
    }
}

/// Refusals that were recorded within the last minute.
#[derive(Debug)]
pub(crate) struct RefusalLog {
    windows: Cache<WorkspaceId, Arc<Mutex<RefusalWindow>>>,
}

impl Default for RefusalLog {
    fn default() -> Self {
        Self { windows: Cache::builder().max_capacity(MAX_WORKSPACES).time_to_idle(WINDOW).build() }
    }
}

impl RefusalLog {
    /// Returns whether a refusal is to be recorded, and counts it as recorded.
    pub(crate) fn is_due(&self, workspace: WorkspaceId, agent: AgentId, refusal: Refusal) -> bool {
        self.with_window(workspace, |window| {
            window.recorded.len() < MAX_RECORDED && window.recorded.insert((agent, refusal))
        })
    }

    /// Returns whether a denied invocation is to be recorded, and counts it as recorded.
    pub(crate) fn is_denial_due(&self, workspace: WorkspaceId, agent: AgentId) -> bool {
        self.with_window(workspace, |window| {
            // An agent gets an entry only with a recorded denial, so `MAX_RECORDED` bounds the map as well.
            let of_agent = window.denials.get(&agent).copied().unwrap_or(0);
            let is_due = of_agent < MAX_DENIALS && window.all_denials < MAX_RECORDED;
            if is_due {
                window.denials.insert(agent, of_agent + 1);
                window.all_denials += 1;
            }
            is_due
        })
    }

    fn with_window<R>(&self, workspace: WorkspaceId, decide: impl FnOnce(&mut RefusalWindow) -> R) -> R {
        let window = self.windows.get_with(workspace, || Arc::new(Mutex::new(RefusalWindow::begin())));
        let mut window = window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.began.elapsed() >= WINDOW {
            *window = RefusalWindow::begin();
        }
        decide(&mut window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn denied_invocations_are_recorded_ten_times_a_minute_and_sixty_in_all() {
        let log = RefusalLog::default();
        let workspace = WorkspaceId::new(1);
        let recorded = |agent| (0..100).filter(|_| log.is_denial_due(workspace, AgentId::new(agent))).count();
        assert_eq!(recorded(1), MAX_DENIALS);
        assert_eq!((2..20).map(recorded).sum::<usize>(), MAX_RECORDED - MAX_DENIALS);
        assert!(log.is_due(workspace, AgentId::new(1), Refusal::Spawn), "other refusals are counted apart");
        tokio::time::advance(WINDOW).await;
        assert_eq!(recorded(1), MAX_DENIALS);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_recorded_once_a_minute_and_sixty_in_all() {
        let log = RefusalLog::default();
        let workspace = WorkspaceId::new(1);
        assert!(log.is_due(workspace, AgentId::new(1), Refusal::Spawn));
        assert!(!log.is_due(workspace, AgentId::new(1), Refusal::Spawn));
        assert!(log.is_due(workspace, AgentId::new(1), Refusal::Send));
        assert!(log.is_due(WorkspaceId::new(2), AgentId::new(1), Refusal::Spawn));
        let recorded = (10..200).filter(|id| log.is_due(workspace, AgentId::new(*id), Refusal::Spawn)).count();
        assert_eq!(recorded, MAX_RECORDED - 2);
        tokio::time::advance(WINDOW).await;
        assert!(log.is_due(workspace, AgentId::new(1), Refusal::Spawn));
    }
}
