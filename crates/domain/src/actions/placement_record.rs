//! Stored explanation of placements, in the JSON form of `invocations.placements`. Written with each placement, read
//! for callers that ask for it.

use serde::{Deserialize, Serialize};

use crate::{NodeId, ProviderName};

/// Decision of one placement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlacementRecord {
    pub attempt: i32,
    /// Time of the decision, in milliseconds since the epoch.
    pub at: i64,
    pub capability: String,
    /// Only eligible node, if the placement was restricted to one.
    pub target: Option<NodeId>,
    pub chosen: Option<ChosenProvider>,
    /// Number of providers with the capability.
    pub candidates: i64,
    pub skipped: Vec<SkippedNode>,
    /// Number of skipped nodes that are not listed.
    #[serde(default)]
    pub skipped_unnamed: i64,
}

/// Chosen provider with the figures at the time of the decision.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChosenProvider {
    pub node_id: NodeId,
    /// Name of the node.
    pub node: String,
    pub provider: ProviderName,
    pub active: i32,
    pub reserved: i64,
    pub max_agents: i32,
    /// Load from 0 to 1 if the provider measures it.
    pub load: Option<f64>,
}

/// Node that was not eligible.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SkippedNode {
    pub node_id: NodeId,
    /// Name of the node.
    pub node: Option<String>,
    /// Name of a [`SkipReason`](crate::nodes::placement::SkipReason).
    pub reason: String,
}
