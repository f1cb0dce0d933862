//! Activity of a running agent, for lists.

use relay_pty::Terminal;

use crate::injection::DeliveryMode;

/// State word of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentState {
    Working,
    Idle,
    /// A message could not be typed for a long time.
    BlockedOnSend,
}

impl AgentState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Working => "working",
            Self::Idle => "idle",
            Self::BlockedOnSend => "blocked_on_send",
        }
    }
}

/// Facts that change while an agent runs; written by its task.
#[derive(Debug, Clone)]
pub(crate) struct AgentInfo {
    /// The terminal of the running process; none between two processes.
    pub(crate) terminal: Option<Terminal>,
    pub(crate) state: AgentState,
    /// Unix time in milliseconds of the last output or step of a delivery.
    pub(crate) last_activity_ms: i64,
    /// Unix time in milliseconds of the start of the process.
    pub(crate) started_ms: i64,
    /// Share of its context that the agent says is left.
    pub(crate) context_left_percent: Option<u8>,
    pub(crate) mode: DeliveryMode,
    pub(crate) pending_count: usize,
    pub(crate) unsettled_count: usize,
}

impl AgentInfo {
    /// Facts about an agent whose program is about to start.
    pub(super) fn starting(now_ms: i64) -> Self {
        Self {
            terminal: None,
            state: AgentState::Working,
            last_activity_ms: now_ms,
            started_ms: now_ms,
            context_left_percent: None,
            mode: DeliveryMode::default(),
            pending_count: 0,
            unsettled_count: 0,
        }
    }

    /// Process id of the agent's own program.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.terminal.as_ref().map(|terminal| terminal.identity().pid)
    }
}
