//! All NATS subjects of the engine.

use relay_domain::{
    AgentId, GatewayId, WorkspaceScope,
    shard::{agent_shard, workspace_shard},
};

/// Subjects of the delivery stream. One stream holds all shards; ranges of shards can move to streams of their own
/// without renaming subjects.
pub(crate) const LOG_WILDCARD: &str = "d.>";
/// Subjects of the event stream.
pub(crate) const EVENTS_WILDCARD: &str = "e.>";
/// Prefix of the subjects on which stored events are republished.
pub(crate) const LIVE_PREFIX: &str = "live.";
/// Prefix of the subjects of live copies for one gateway.
const COPIES: &str = "relay.live";
/// Subject of hints for every process, and prefix of those for one gateway.
const HINTS: &str = "relay.hints";

/// Returns the subject of an agent's log.
pub(crate) fn log_subject(scope: WorkspaceScope, agent: AgentId) -> String {
    let workspace = scope.workspace_id();
    format!("d.{}.{workspace}.{agent}", agent_shard(workspace, agent))
}

/// Returns the subject of live copies for a gateway.
pub(crate) fn live_subject(gateway: GatewayId) -> String {
    format!("{COPIES}.{gateway}")
}

/// Returns the subject of a workspace's events.
pub(crate) fn event_subject(scope: WorkspaceScope) -> String {
    let workspace = scope.workspace_id();
    format!("e.{}.{workspace}", workspace_shard(workspace))
}

/// Returns the subject of a workspace's live events.
pub(crate) fn live_event_subject(scope: WorkspaceScope) -> String {
    format!("{LIVE_PREFIX}{}", event_subject(scope))
}

/// Returns the subject of hints for one gateway, or of those for every process.
pub(crate) fn hint_subject(gateway: Option<GatewayId>) -> String {
    gateway.map_or_else(|| HINTS.to_owned(), |gateway| format!("{HINTS}.{gateway}"))
}

/// Returns the subject filters of a workspace's messages: deliveries, then events.
pub(crate) fn workspace_filters(scope: WorkspaceScope) -> [String; 2] {
    let workspace = scope.workspace_id();
    [format!("d.*.{workspace}.>"), format!("e.*.{workspace}")]
}

/// Returns the subject of liveness probes to a gateway.
pub(crate) fn probe_subject(gateway: GatewayId) -> String {
    format!("relay.probe.{gateway}")
}
