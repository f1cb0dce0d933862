//! `agent-relay-broker` 12.4.1 and 9.1.6 from npm, unmodified, after the loss of their state folder.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_acceptance::clients::{Broker, BrokerRelease};
use relay_testkit::client::Api;
use relay_testkit::{shared, wait};
use serde_json::Value;
use tempfile::TempDir;

const NAME: &str = "box";
const SOON: Duration = Duration::from_secs(45);

/// Machine with a broker at the first gateway, seen through the second.
struct Machine {
    release: BrokerRelease,
    gateway: &'static str,
    workspace: Api,
    folder: TempDir,
}

impl Machine {
    async fn new(release: BrokerRelease) -> Result<Self> {
        let engine = shared().await;
        let workspace = Api::create_workspace(&engine.gateways[1], "lost-state").await?;
        Ok(Self { release, gateway: &engine.gateways[0], workspace, folder: tempfile::tempdir()? })
    }

    /// Starts the broker with a state folder of this name.
    async fn start(&self, folder: &str) -> Result<Broker> {
        let dir = self.folder.path().join(folder);
        Broker::start_release(self.release, self.gateway, self.workspace.token(), NAME, &dir).await
    }

    async fn nodes(&self) -> Result<Vec<Value>> {
        let nodes = self.workspace.get("/v1/nodes").await?.success()?;
        // Agents have nodes of their own.
        let brokers = nodes.as_array().into_iter().flatten().filter(|node| node["role"] == "broker");
        Ok(brokers.cloned().collect())
    }

    /// Waits until the workspace has one broker node, with this status.
    async fn wait_for_node(&self, status: &str) -> Result<Value> {
        wait::until_ok(&format!("the broker's node to be {status}"), SOON, || async {
            let nodes = self.nodes().await?;
            ensure!(nodes.len() == 1 && nodes[0]["status"] == status, "{nodes:?}");
            anyhow::Ok(nodes[0].clone())
        })
        .await
    }

    /// Starts the broker for the first time and stops it. Returns its node.
    async fn run_once(&self) -> Result<Value> {
        let broker = self.start("first").await?;
        self.wait_for_node("online").await?;
        broker.terminate().await?;
        self.wait_for_node("offline").await
    }

    async fn delete(&self, path: &str) -> Result<()> {
        let deleted = self.workspace.delete(path).await?;
        ensure!(deleted.status == 204, "{path}: {} {}", deleted.status, deleted.body);
        Ok(())
    }

    async fn delete_node(&self, node: &Value) -> Result<()> {
        self.delete(&format!("/v1/nodes/{}", node["name"].as_str().unwrap_or_default())).await
    }
}

/// Its user restores the folder, takes another name, or deletes the node and the broker's own agent, as here.
#[tokio::test]
async fn broker_12_gets_its_name_when_its_node_and_its_agent_are_deleted() -> Result<()> {
    let machine = Machine::new(BrokerRelease::V12).await?;
    let first = machine.run_once().await?;
    assert_eq!(first["name"], NAME);
    // An empty folder: the broker has lost the proof that its own agent is its own, and ends.
    if let Ok(second) = machine.start("second").await {
        wait::until("it to end", SOON, || async { !second.is_running() }).await;
    }
    machine.delete(&format!("/v1/agents/{NAME}")).await?;
    // It has invented another id as well, and goes on without a node.
    let second = machine.start("second").await?;
    wait::until("its own agent to be registered again", SOON, || async {
        machine.workspace.get(&format!("/v1/agents/{NAME}")).await.is_ok_and(|reply| reply.is_success())
    })
    .await;
    let unchanged = machine.wait_for_node("offline").await?;
    assert_eq!(unchanged["id"], first["id"], "{unchanged}");
    second.kill9();
    machine.delete_node(&first).await?;
    machine.delete(&format!("/v1/agents/{NAME}")).await?;
    let broker = machine.start("third").await?;
    let third = machine.wait_for_node("online").await?;
    assert_ne!(third["id"], first["id"]);
    broker.terminate().await
}

/// Its user restores the folder, or deletes the node and starts the broker again, as here.
#[tokio::test]
async fn broker_9_gets_its_name_when_its_node_is_deleted() -> Result<()> {
    let machine = Machine::new(BrokerRelease::V9).await?;
    let first = machine.run_once().await?;
    let restored = machine.start("first").await?;
    assert_eq!(machine.wait_for_node("online").await?["id"], first["id"], "its folder contains its node's id");
    restored.terminate().await?;
    machine.wait_for_node("offline").await?;
    // An empty folder: the broker gets a suffix for its own agent, and has invented another id for its node, whose name
    // is that of the machine. It prints the reason and goes on without a node.
    let second = machine.start("second").await?;
    let expected = ["registered as 'box-", "no node token available for node 'node_"];
    wait::until_ok("its report", SOON, || async {
        let log = second.log_tail(20);
        ensure!(expected.iter().all(|text| log.contains(text)), "{log}");
        anyhow::Ok(())
    })
    .await?;
    let unchanged = machine.wait_for_node("offline").await?;
    assert_eq!(unchanged["id"], first["id"], "{unchanged}");
    machine.delete_node(&first).await?;
    second.terminate().await?;
    let second = machine.start("second").await?;
    let node = machine.wait_for_node("online").await?;
    assert_eq!(node["name"], first["name"]);
    assert_ne!(node["id"], first["id"]);
    second.terminate().await
}
