//! Scene of http_push tests.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Agent, Api};
use relay_testkit::receiver::{Receiver, Reply};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

/// An attempt takes milliseconds; the limit allows for a loaded machine and an attempt that times out after 10 s.
const SOON: Duration = Duration::from_secs(40);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Workspace with a sender and an agent on an http_push node.
pub struct Scene {
    /// Client with the workspace key.
    pub key: Api,
    pub ann: Api,
    pub bob: Agent,
    /// Endpoint of the recipient, at `/hook`.
    pub receiver: Receiver,
}

impl Scene {
    /// Creates the scene on the shared engine; `delivery` has no URL.
    pub async fn new(name: &str, delivery: Value) -> Result<Self> {
        Self::on_gateway(shared().await.any_gateway(), name, delivery).await
    }

    /// Creates the scene on the engine of this gateway; `delivery` has no URL.
    pub async fn on_gateway(gateway: &str, name: &str, delivery: Value) -> Result<Self> {
        let key = Api::create_workspace(gateway, name).await?;
        let ann = key.register_agent("ann").await?;
        let bob = key.register_agent("bob").await?;
        let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
        let mut delivery = delivery;
        delivery["url"] = json!(receiver.url("/hook"));
        let body = json!({ "name": "hook", "kind": "http_push", "delivery": delivery });
        key.post("/v1/nodes", body).await?.success()?;
        let scene = Self { ann: key.as_agent(&ann), key, bob, receiver };
        scene.key.bind("hook", "bob").await?;
        Ok(scene)
    }

    /// Creates another agent on another node, at `/hook` of this receiver, acknowledged by a 2xx.
    pub async fn neighbour(&self, name: &str, receiver: &Receiver) -> Result<Agent> {
        let delivery = json!({ "url": receiver.url("/hook"), "ack_mode": "on_2xx" });
        let node = json!({ "name": format!("of-{name}"), "kind": "http_push", "delivery": delivery });
        self.key.post("/v1/nodes", node).await?.success()?;
        let agent = self.key.register_agent(name).await?;
        self.key.bind(&format!("of-{name}"), name).await?;
        Ok(agent)
    }

    pub async fn workspace_id(&self) -> Result<i64> {
        Ok(text(&self.key.get("/v1/workspace").await?.success()?["id"]).parse()?)
    }

    /// Sends bob a message and returns its id.
    pub async fn send(&self, message: &str) -> Result<String> {
        let sent = self.ann.dm("bob", message).await?.success()?;
        Ok(text(&sent["id"]).to_owned())
    }

    /// Returns bob's deliveries in a state; by default the queued and delivered ones.
    pub async fn deliveries(&self, query: &str) -> Result<Vec<Value>> {
        let listed = self.key.as_agent(&self.bob).get(&format!("/v1/deliveries{query}")).await?.success()?;
        Ok(listed.as_array().cloned().unwrap_or_default())
    }

    /// Waits until bob's deliveries fulfil a condition.
    pub async fn wait_for_deliveries(
        &self,
        what: &str,
        query: &str,
        condition: impl Fn(&[Value]) -> bool,
    ) -> Result<Vec<Value>> {
        wait::until_ok(what, SOON, || async {
            let rows = self.deliveries(query).await?;
            if condition(&rows) { Ok(rows) } else { Err(anyhow::anyhow!("{}", Value::Array(rows))) }
        })
        .await
    }

    /// Waits until the endpoint has received this many calls.
    pub async fn wait_for_calls(&self, count: usize) {
        wait::until("calls", SOON, || async { self.receiver.calls("/hook").len() >= count }).await;
    }

    /// Returns the attempts of a delivery, as its recipient reads them.
    pub async fn attempts(&self, delivery: &Value) -> Result<Vec<Value>> {
        let path = format!("/v1/deliveries/{}/attempts", text(&delivery["id"]));
        let listed = self.key.as_agent(&self.bob).get(&path).await?.success()?;
        Ok(listed.as_array().cloned().unwrap_or_default())
    }
}
