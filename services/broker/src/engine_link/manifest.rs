//! Capabilities that this node offers to the engine.

use relay_wire::nodes::frame::{Capability, Heartbeat, Register};
use serde_json::json;

use crate::{api::types::RunnerManifest, version};

/// Negotiates positions of mailboxes.
const CURSOR: &str = "relay:delivery-cursor-v1";
const RELEASE: &str = "release";
const LIVE_AGENTS: &str = "relay:live-agents:v1";

/// Name, capabilities and capacity of the node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Manifest {
    pub(crate) node_id: String,
    pub(crate) name: String,
    pub(crate) capabilities: Vec<Capability>,
    /// 0 is unlimited.
    pub(crate) max_agents: u32,
    pub(crate) tags: Vec<String>,
    /// Handlers beyond the broker's own are connected, or it starts programs by itself.
    pub(crate) handlers_live: bool,
}

impl Manifest {
    /// The manifest without a runner: the broker's own capabilities and `spawn:<harness>` for each given.
    pub(crate) fn bootstrap(node_id: &str, name: &str, harnesses: &[String], max_agents: u32) -> Self {
        let own = [CURSOR.to_owned(), RELEASE.to_owned()];
        let spawns = harnesses.iter().map(|harness| format!("spawn:{harness}"));
        Self {
            node_id: node_id.to_owned(),
            name: name.to_owned(),
            capabilities: own.into_iter().chain(spawns).map(capacity).collect(),
            max_agents,
            tags: Vec::new(),
            handlers_live: !harnesses.is_empty(),
        }
    }

    /// The manifest with what a runner offers beside the broker's own capabilities. Its version becomes a tag: engines
    /// treat the node by the broker's.
    pub(crate) fn with_runner(&self, runner: RunnerManifest) -> Self {
        let is_own = |capability: &&Capability| [CURSOR, RELEASE].contains(&capability.name.as_str());
        let mut capabilities: Vec<Capability> = self.capabilities.iter().filter(is_own).cloned().collect();
        for capability in runner.capabilities {
            // The broker's own come first and stay: hosted agents depend on the cursor and on releases.
            if !capabilities.iter().any(|known| known.name == capability.name) {
                capabilities.push(capability);
            }
        }
        let version = runner.version.map(|version| format!("runner:{version}"));
        Self {
            node_id: self.node_id.clone(),
            name: if runner.name.trim().is_empty() { self.name.clone() } else { runner.name },
            capabilities,
            max_agents: runner.max_agents.unwrap_or(self.max_agents),
            tags: runner.tags.into_iter().chain(version).collect(),
            handlers_live: self.handlers_live,
        }
    }

    /// Returns whether the engine would register the same.
    pub(super) fn is_same_offer(&self, other: &Self) -> bool {
        *self == Self { handlers_live: self.handlers_live, ..other.clone() }
    }

    /// Time that the handler of an action may take, if its capability says so.
    pub(crate) fn handler_timeout_ms(&self, action: &str) -> Option<u64> {
        let capability = self.capabilities.iter().find(|capability| capability.name == action)?;
        capability.metadata.as_ref()?.get("timeout_ms")?.as_u64()
    }

    /// The registration. Without a provider key the broker is the node's default provider, whose actions can be
    /// invoked by name across the workspace.
    pub(super) fn register(&self) -> Register {
        Register {
            name: self.name.clone(),
            node_id: self.node_id.clone(),
            provider: None,
            capabilities: self.capabilities.clone(),
            max_agents: self.max_agents,
            tags: self.tags.clone(),
            repo_keys: None,
            version: version::wire(),
            machine_id: None,
        }
    }

    /// A sign of life with the names of the agents.
    pub(super) fn heartbeat(&self, names: &[String]) -> Heartbeat {
        let live = Capability { metadata: Some(json!({ "names": names })), ..capacity(LIVE_AGENTS.to_owned()) };
        let active = u32::try_from(names.len()).unwrap_or(u32::MAX);
        let load = if self.max_agents == 0 { 0.0 } else { f64::from(active) / f64::from(self.max_agents) };
        Heartbeat {
            node_id: Some(self.node_id.clone()),
            load: Some(load.min(1.0)),
            load_reported: Some(self.max_agents > 0),
            active_agents: active,
            handlers_live: self.handlers_live,
            name: Some(self.name.clone()),
            capabilities: Some(self.capabilities.iter().cloned().chain([live]).collect()),
            max_agents: Some(self.max_agents),
            version: Some(version::wire()),
        }
    }
}

fn capacity(name: String) -> Capability {
    Capability { name, kind: Some("capacity".to_owned()), global: None, queue: None, metadata: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_never_offers_a_bare_spawn() {
        let manifest = Manifest::bootstrap("node_1", "box", &["claude".to_owned()], 4);
        let names: Vec<_> = manifest.capabilities.iter().map(|capability| capability.name.as_str()).collect();
        assert_eq!(names, [CURSOR, RELEASE, "spawn:claude"]);
        let heartbeat = manifest.heartbeat(&["a".to_owned()]);
        assert_eq!((heartbeat.load, heartbeat.active_agents, heartbeat.handlers_live), (Some(0.25), 1, true));
        assert_eq!((heartbeat.name.as_deref(), heartbeat.node_id.as_deref()), (Some("box"), Some("node_1")));
        let runner = RunnerManifest {
            capabilities: vec![capacity(RELEASE.to_owned()), capacity("build".to_owned())],
            version: Some("1".to_owned()),
            ..RunnerManifest::default()
        };
        let merged = manifest.with_runner(runner);
        let names: Vec<_> = merged.capabilities.iter().map(|capability| capability.name.as_str()).collect();
        assert_eq!((names, merged.name.as_str()), (vec![CURSOR, RELEASE, "build"], "box"));
        assert_eq!(merged.tags, ["runner:1"]);
        assert!(!Manifest::bootstrap("node_1", "box", &[], 0).handlers_live);
    }
}
