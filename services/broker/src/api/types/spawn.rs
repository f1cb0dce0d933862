//! Body of `POST /api/spawn`, also in the `spawn_agent` frame of runners, and its parts.

use std::collections::BTreeMap;

use relay_verification::{Channel, delivery::UnverifiedPolicy};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Body of `POST /api/spawn`. Drivers write the keys in camel case or in snake case.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct SpawnBody {
    pub(crate) name: String,
    pub(crate) cli: Option<String>,
    pub(crate) args: Vec<String>,
    #[serde(alias = "runtime")]
    pub(crate) transport: Option<String>,
    pub(crate) provider: Option<String>,
    pub(crate) model: Option<String>,
    #[serde(alias = "initial_task", alias = "initialTask")]
    pub(crate) task: Option<String>,
    #[serde(alias = "continue_from")]
    pub(crate) continue_from: Option<String>,
    pub(crate) channels: Vec<String>,
    #[serde(alias = "workspace_id")]
    pub(crate) workspace_id: Option<String>,
    #[serde(alias = "workspace_alias")]
    pub(crate) workspace_alias: Option<String>,
    pub(crate) cwd: Option<String>,
    pub(crate) team: Option<String>,
    pub(crate) parent: Option<String>,
    #[serde(alias = "idle_threshold_secs")]
    pub(crate) idle_threshold_secs: Option<u64>,
    #[serde(alias = "restart_policy", deserialize_with = "relay_wire::field::optional_object")]
    pub(crate) restart_policy: Option<RestartPolicy>,
    #[serde(alias = "harness_config", alias = "harnessPlan", alias = "harness_plan")]
    pub(crate) harness_config: Option<HarnessConfig>,
    #[serde(alias = "spawn_mode")]
    pub(crate) spawn_mode: Option<String>,
    #[serde(alias = "exit_after_task")]
    pub(crate) exit_after_task: bool,
    #[serde(alias = "skip_relay_prompt")]
    pub(crate) skip_relay_prompt: bool,
    #[serde(alias = "allow_permission_bypass")]
    pub(crate) allow_permission_bypass: bool,
    #[serde(alias = "agent_token")]
    pub(crate) agent_token: Option<String>,
    #[serde(alias = "agent_result_schema", alias = "resultSchema", alias = "result_schema")]
    pub(crate) agent_result_schema: Option<Value>,
    #[serde(alias = "session_id")]
    pub(crate) session_id: Option<String>,
    #[serde(alias = "harness_id")]
    pub(crate) harness_id: Option<Value>,
    #[serde(skip)]
    pub(crate) invocation_id: Option<String>,
}

/// Program that a driver has resolved by itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct HarnessConfig {
    pub(crate) runtime: Option<String>,
    pub(crate) command: Option<String>,
    pub(crate) args: Vec<String>,
    pub(crate) cwd: Option<String>,
    pub(crate) env: BTreeMap<String, String>,
    #[serde(alias = "session_id")]
    pub(crate) session_id: Option<String>,
    pub(crate) metadata: Option<HarnessMetadata>,
    #[serde(flatten)]
    pub(crate) app_server: AppServerConfig,
}

/// Wishes of a driver beside the program; other keys are its own.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct HarnessMetadata {
    pub(crate) verification: VerificationOverride,
}

/// Changes of a program's verification for one agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct VerificationOverride {
    /// Treatment of silence.
    pub(crate) policy: Option<UnverifiedPolicy>,
    /// Channels whose silence counts.
    pub(crate) channels: Option<Vec<Channel>>,
}

/// When an agent that ended by itself is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RestartPolicy {
    pub(crate) enabled: bool,
    #[serde(alias = "maxRestarts")]
    pub(crate) max_restarts: u32,
    #[serde(alias = "cooldownMs")]
    pub(crate) cooldown_ms: u64,
    #[serde(alias = "maxConsecutiveFailures")]
    pub(crate) max_consecutive_failures: u32,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self { enabled: true, max_restarts: 5, cooldown_ms: 2000, max_consecutive_failures: 3 }
    }
}

/// App server as a driver describes it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct AppServerConfig {
    pub(crate) driver: Option<String>,
    pub(crate) protocol: Option<String>,
    pub(crate) endpoint: Option<String>,
    pub(crate) auth: Option<AppServerAuth>,
    pub(crate) host: Option<AppServerHost>,
    pub(crate) release: AppServerRelease,
}

#[derive(Debug, Deserialize)]
pub(crate) struct AppServerHost {
    #[serde(default)]
    pub(crate) ownership: Option<String>,
}

/// Credentials for the server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum AppServerAuth {
    #[default]
    None,
    Bearer {
        token: String,
    },
    Basic {
        username: String,
        #[serde(default)]
        password: Option<String>,
    },
}

/// Fate of the session at the release of its agent.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AppServerRelease {
    Abort,
    #[default]
    Detach,
    Delete,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_needs_no_field() {
        let policy: RestartPolicy = serde_json::from_str(r#"{"maxRestarts": 1}"#).expect("a policy");
        assert_eq!(policy, RestartPolicy { max_restarts: 1, ..RestartPolicy::default() });
    }
}
