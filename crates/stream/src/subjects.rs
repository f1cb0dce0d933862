//! Every subject the engine uses.

use relay_domain::{
    AgentId, GatewayId, WorkspaceScope,
    shard::{shard_of, shard_of_workspace},
};

/// What the delivery streams capture. One stream holds all shards until one is not enough; ranges of
/// shards can then move to streams of their own without renaming anything.
pub(crate) const LOG_WILDCARD: &str = "d.>";
/// What the event stream captures.
pub(crate) const EVENTS_WILDCARD: &str = "e.>";
/// Where stored deliveries and events are republished: `live.` before the subject that they were stored under.
pub(crate) const LIVE_PREFIX: &str = "live.";
/// Hints for every process.
pub(crate) const HINTS: &str = "relay.hints";

/// An agent's log.
pub(crate) fn log_subject(scope: WorkspaceScope, agent: AgentId) -> String {
    let workspace = scope.workspace_id();
    format!("d.{}.{workspace}.{agent}", shard_of(workspace, agent))
}

/// An agent's live tail.
pub(crate) fn live_subject(scope: WorkspaceScope, agent: AgentId) -> String {
    format!("{LIVE_PREFIX}{}", log_subject(scope, agent))
}

/// A workspace's events.
pub(crate) fn event_subject(scope: WorkspaceScope) -> String {
    let workspace = scope.workspace_id();
    format!("e.{}.{workspace}", shard_of_workspace(workspace))
}

/// A workspace's events, live.
pub(crate) fn live_event_subject(scope: WorkspaceScope) -> String {
    format!("{LIVE_PREFIX}{}", event_subject(scope))
}

/// Hints that concern one gateway only.
pub(crate) fn gateway_hints(gateway: GatewayId) -> String {
    format!("{HINTS}.{gateway}")
}

/// What the streams hold of a workspace, as filters: deliveries, then events.
pub(crate) fn all_of_workspace(scope: WorkspaceScope) -> [String; 2] {
    let workspace = scope.workspace_id();
    [format!("d.*.{workspace}.>"), format!("e.*.{workspace}")]
}

/// Where a gateway answers liveness probes.
pub(crate) fn probe_subject(gateway: GatewayId) -> String {
    format!("relay.probe.{gateway}")
}
