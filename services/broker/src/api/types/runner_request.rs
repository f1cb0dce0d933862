//! Payloads of the runner's requests, and answers to them. Requests that are not here have the body of a route.

use std::{collections::BTreeMap, path::PathBuf};

use relay_wire::nodes::frame::Capability;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{RestartPolicy, SpawnBody};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Hello {
    pub(crate) client_name: Option<String>,
    pub(crate) client_version: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RegisterNode {
    #[serde(deserialize_with = "relay_wire::field::object")]
    pub(crate) manifest: RunnerManifest,
    #[serde(default, deserialize_with = "relay_wire::field::optional_object")]
    pub(crate) supervision: Option<Supervision>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RegisterHandlers {
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct HandlerResult {
    pub(crate) invocation_id: String,
    #[serde(default, deserialize_with = "relay_wire::field::present")]
    pub(crate) output: Option<Option<Value>>,
    #[serde(default)]
    pub(crate) error: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SpawnAgent {
    #[serde(deserialize_with = "relay_wire::field::object")]
    pub(crate) agent: SpawnBody,
    #[serde(default, alias = "initialTask")]
    pub(crate) initial_task: Option<String>,
    #[serde(default, alias = "skipRelayPrompt")]
    pub(crate) skip_relay_prompt: Option<bool>,
    #[serde(default, alias = "invocationId")]
    pub(crate) invocation_id: Option<String>,
}

/// The node as a runner describes it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct RunnerManifest {
    pub(crate) name: String,
    #[serde(deserialize_with = "relay_wire::field::objects")]
    pub(crate) capabilities: Vec<Capability>,
    #[serde(alias = "maxAgents")]
    pub(crate) max_agents: Option<u32>,
    pub(crate) tags: Vec<String>,
    pub(crate) version: Option<String>,
}

/// The program of a runner, and the rules of its restart.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Supervision {
    pub(crate) argv: Vec<String>,
    #[serde(default)]
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    #[serde(default, alias = "restartPolicy", deserialize_with = "relay_wire::field::object")]
    pub(crate) restart_policy: RestartPolicy,
}

impl Supervision {
    /// Returns whether there is a program to start.
    pub(crate) fn is_valid(&self) -> bool {
        self.argv.first().is_some_and(|program| !program.is_empty())
    }
}

/// Answer to a request of the runner socket itself.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum RunnerAnswer {
    Hello {
        broker_version: &'static str,
        protocol_version: u64,
    },
    NodeRegistered {
        registered: bool,
        /// The engine is unavailable; the registration follows.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        pending: bool,
    },
    HandlersRegistered {
        handlers_live: bool,
    },
    ResultTaken {
        completed: bool,
    },
    NodeDeregistered {
        deregistered: bool,
    },
}

impl From<RunnerAnswer> for Value {
    fn from(answer: RunnerAnswer) -> Self {
        // A struct of numbers, texts and flags has a value.
        serde_json::to_value(answer).unwrap_or_default()
    }
}
