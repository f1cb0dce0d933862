//! Two agents in a channel, at different gateways: what many tests of the API begin with.

use anyhow::Result;
use relay_testkit::client::{Agent, Api};
use relay_testkit::shared;
use serde_json::Value;

/// A workspace with ann and bob in `#room`.
pub struct Room {
    /// With the workspace's key.
    pub key: Api,
    /// Ann's, at the first gateway.
    pub ann: Api,
    /// Bob's, at the second gateway.
    pub bob: Api,
    /// Who ann is.
    pub ann_is: Agent,
    /// Who bob is.
    pub bob_is: Agent,
}

impl Room {
    /// On the shared engine.
    pub async fn new(name: &str) -> Result<Self> {
        let gateways = &shared().await.gateways;
        let key = Api::create_workspace(&gateways[0], name).await?;
        let (ann_is, bob_is) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let (ann, bob) = (key.as_agent(&ann_is), key.as_agent(&bob_is).at(&gateways[1]));
        ann.create_channel("room").await?;
        bob.join("room").await?;
        Ok(Self { key, ann, bob, ann_is, bob_is })
    }
}

/// A string of an answer; empty if it is none.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A list of an answer; empty if it is none.
pub fn rows(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}
