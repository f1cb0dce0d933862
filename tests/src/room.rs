//! Scene of many API tests: two agents in a channel, at different gateways.

use anyhow::Result;
use relay_testkit::client::{Agent, Api};
use relay_testkit::shared;
use serde_json::Value;

/// Workspace with ann and bob in `#room`.
pub struct Room {
    /// Client with the workspace key.
    pub key: Api,
    /// Client of ann at the first gateway.
    pub ann: Api,
    /// Client of bob at the second gateway.
    pub bob: Api,
    pub ann_agent: Agent,
    pub bob_agent: Agent,
}

impl Room {
    /// Creates the scene on the shared engine.
    pub async fn new(name: &str) -> Result<Self> {
        let gateways = &shared().await.gateways;
        let key = Api::create_workspace(&gateways[0], name).await?;
        let (ann_is, bob_is) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let (ann, bob) = (key.as_agent(&ann_is), key.as_agent(&bob_is).at(&gateways[1]));
        ann.create_channel("room").await?;
        bob.join("room").await?;
        Ok(Self { key, ann, bob, ann_agent: ann_is, bob_agent: bob_is })
    }
}

/// Returns a string of an answer; empty for other values.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns a list of an answer; empty for other values.
pub fn rows(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}
