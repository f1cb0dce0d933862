//! Every subject the engine uses.

use relay_domain::{AgentId, GatewayId, WorkspaceScope, shard::shard_of};

/// What the delivery streams capture. One stream holds all shards until one is not enough; ranges of
/// shards can then move to streams of their own without renaming anything.
pub(crate) const LOG_WILDCARD: &str = "d.>";
/// Where stored deliveries are republished: `live.` before the subject that they were stored under.
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

/// Where a gateway answers liveness probes.
pub(crate) fn probe_subject(gateway: GatewayId) -> String {
    format!("relay.probe.{gateway}")
}
