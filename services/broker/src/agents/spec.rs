//! [`AgentSpec`]: everything that is needed to start an agent, also once more.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use relay_verification::{Channel, RequiredChannels, strategy::Strategy};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Headless;
use crate::api::types::{RestartPolicy, VerificationOverride};

/// An agent as it was asked for. Kept in the state file for a restart.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct AgentSpec {
    pub(crate) name: String,
    // Fields that came later have a default: the state file of an earlier broker lacks them.
    /// Id or alias of its workspace, as it was asked for; the id once it was started.
    #[serde(default)]
    pub(crate) workspace: Option<String>,
    /// Command line or label, as drivers are shown it.
    pub(crate) cli: String,
    pub(crate) program: String,
    pub(crate) args: Vec<String>,
    #[serde(default)]
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) provider: Option<String>,
    #[serde(default)]
    pub(crate) model: Option<String>,
    #[serde(default)]
    pub(crate) task: Option<String>,
    /// Agent whose notes go in front of the task; none once they do.
    #[serde(default)]
    pub(crate) continue_from: Option<String>,
    #[serde(default)]
    pub(crate) channels: Vec<String>,
    #[serde(default)]
    pub(crate) team: Option<String>,
    #[serde(default)]
    pub(crate) parent: Option<String>,
    #[serde(default)]
    pub(crate) session_id: Option<String>,
    #[serde(default)]
    pub(crate) session_source: SessionSource,
    /// The session can be resumed by the program.
    #[serde(default)]
    pub(crate) is_resumable: bool,
    #[serde(default)]
    pub(crate) idle_threshold_secs: u64,
    #[serde(default)]
    pub(crate) restart_policy: Option<RestartPolicy>,
    /// No relay variables, no reminder, no ack hint.
    #[serde(default)]
    pub(crate) skip_relay_prompt: bool,
    /// Started with the arguments that switch the program's permission questions off.
    #[serde(default)]
    pub(crate) allow_permission_bypass: bool,
    /// Token of an agent that was registered elsewhere.
    #[serde(default)]
    pub(crate) agent_token: Option<String>,
    #[serde(default)]
    pub(crate) verification: VerificationOverride,
    #[serde(default)]
    pub(crate) result_schema: Option<Value>,
    #[serde(default)]
    pub(crate) invocation_id: Option<String>,
    /// Way to an agent without a terminal.
    #[serde(default)]
    pub(crate) headless: Option<Headless>,
}

impl AgentSpec {
    /// Word for the way in which the agent runs.
    pub(crate) fn runtime(&self) -> &'static str {
        if self.headless.is_some() { "headless" } else { "pty" }
    }
}

/// Origin of an agent's session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SessionSource {
    /// The broker has chosen its id: the program begins it.
    #[default]
    New,
    /// A driver wants it to be continued.
    Continued,
    /// The driver's arguments name it already.
    InArguments,
}

impl VerificationOverride {
    /// The strategy of a program with these changes.
    pub(crate) fn apply(&self, strategy: Strategy) -> Strategy {
        let required = self.channels.as_ref().map_or(strategy.required, |channels| RequiredChannels {
            echo: channels.contains(&Channel::Echo),
            file: channels.contains(&Channel::File),
            mcp: channels.contains(&Channel::Mcp),
            api: channels.contains(&Channel::Api),
        });
        Strategy { required, silent: self.policy.unwrap_or(strategy.silent), ..strategy }
    }
}

/// Time after which a running program resets the count of consecutive failures.
const HEALTHY_LIFE: Duration = Duration::from_secs(60);

/// Restarts of one agent so far. Pure.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RestartCount {
    pub(crate) restarts: u32,
    consecutive: u32,
}

impl RestartCount {
    /// Decides about an agent that failed after a life of this length: the pause before its restart, or the reason why
    /// there is none.
    pub(crate) fn on_failure(&mut self, policy: &RestartPolicy, life: Duration) -> Result<Duration, String> {
        // After a healthy life this failure is the first of a new row.
        self.consecutive = if life >= HEALTHY_LIFE { 1 } else { self.consecutive + 1 };
        if self.restarts >= policy.max_restarts {
            return Err(format!("it was restarted {} times", self.restarts));
        }
        if self.consecutive > policy.max_consecutive_failures {
            return Err(format!("it failed {} times in a row", self.consecutive));
        }
        self.restarts += 1;
        Ok(Duration::from_millis(policy.cooldown_ms))
    }
}

/// Requester of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpawnSource {
    HttpApi,
    Runner,
    Engine,
    /// An earlier process of the broker; the agent runs again after a crash.
    Restart,
}

impl SpawnSource {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::HttpApi | Self::Restart => "http_api",
            Self::Runner => "runner",
            Self::Engine => "engine",
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_verification::delivery::UnverifiedPolicy;

    use super::*;

    #[test]
    fn restarts_end_by_their_number_or_by_failures_in_a_row() {
        let policy = RestartPolicy { max_restarts: 4, max_consecutive_failures: 2, ..RestartPolicy::default() };
        let mut count = RestartCount::default();
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(60));
        assert!(count.on_failure(&policy, short).is_ok() && count.on_failure(&policy, short).is_ok());
        assert!(count.on_failure(&policy, short).is_err());
        let mut count = RestartCount::default();
        assert!((0..4).all(|_| count.on_failure(&policy, long).is_ok()));
        assert_eq!(count.on_failure(&policy, long), Err("it was restarted 4 times".into()));
    }

    #[test]
    fn a_spawn_changes_policy_and_channels() {
        let changes: VerificationOverride =
            serde_json::from_str(r#"{"policy": "strict", "channels": ["mcp"]}"#).expect("changes");
        let claude = Strategy::builtin("claude");
        let changed = changes.apply(claude);
        let mcp = RequiredChannels { mcp: true, ..RequiredChannels::NONE };
        assert_eq!((changed.required, changed.silent), (mcp, UnverifiedPolicy::Strict));
        assert_eq!(VerificationOverride::default().apply(claude), claude);
        assert!(serde_json::from_str::<VerificationOverride>(r#"{"policy": "never"}"#).is_err());
    }
}
