//! Registrations during a storage outage. Direct clients neither wait for the answer nor read it: they reconnect only
//! after a close.

use std::{cell::RefCell, collections::HashSet, time::Duration};

use anyhow::{Result, bail, ensure};
use relay_acceptance::chaos::scene::Scene;
use relay_testkit::{
    client::{Agent, Api, NodeSocket, NodeToken},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};

/// A registration is attempted for 8 s; the rest is for a loaded machine.
const SOON: Duration = Duration::from_secs(40);

/// Private engine with an agent that has pending deliveries.
async fn scene() -> Result<(Scene, Agent, Api)> {
    let scene = Scene::start_with(Stack::builder().gateways(1)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let ada = scene.workspace.as_agent(&scene.workspace.register_agent("ada").await?);
    scene.dm(&sam, 0, "ada", "one").await?;
    Ok((scene, sam, ada))
}

async fn connect(ada: &Api) -> Result<(NodeToken, NodeSocket)> {
    let node = ada.direct_node_token().await?;
    let socket = NodeSocket::connect(&ada.ws_base(), &node.token).await?;
    Ok((node, socket))
}

/// Registers like the SDKs, without reading the answer.
async fn register(node: &NodeToken, socket: &NodeSocket) -> Result<()> {
    let frame = json!({
        "v": 1, "type": "node.register", "id": "sdk-direct-1", "node_id": node.node_id, "name": node.name,
        "capabilities": [], "max_agents": 1, "tags": ["implicit", "direct", "sdk"], "version": "test/1",
    });
    socket.send_json(&frame).await
}

/// Receives the deliveries up to this seq as a client that reconnects after each close.
async fn received(ada: &Api, mut socket: NodeSocket, up_to: i64) -> Result<Vec<Value>> {
    let mut texts = Vec::new();
    loop {
        let frame = match socket.next_frame(SOON).await {
            Ok(frame) => frame,
            Err(error) => {
                let Ok(closed) = socket.closed(Duration::ZERO).await else { bail!("{error:#}") };
                println!("closed with {closed:?}, and back again");
                let (node, again) = connect(ada).await?;
                register(&node, &again).await?;
                socket = again;
                continue;
            }
        };
        ensure!(frame["type"] != "error", "{frame}");
        if frame["type"] == "deliver" {
            texts.push(frame["payload"]["data"]["text"].clone());
            if frame["seq"] == up_to {
                return Ok(texts);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_waits_for_storage_to_recover() -> Result<()> {
    let (scene, sam, ada) = scene().await?;
    let (node, socket) = connect(&ada).await?;
    let held = scene.database.lock("LOCK TABLE providers IN ACCESS EXCLUSIVE MODE").await?;
    register(&node, &socket).await?;
    let attempts = RefCell::new(HashSet::new());
    wait::until("a second attempt of the registration", SOON, || async {
        let since = scene.database.registration_waits_since().await.unwrap_or_default();
        attempts.borrow_mut().extend(since);
        attempts.borrow().len() > 1
    })
    .await;
    held.rollback().await?;
    scene.dm(&sam, 0, "ada", "two").await?;
    assert_eq!(received(&ada, socket, 2).await?, [json!("one"), json!("two")]);
    Ok(())
}

/// With the second table locked, the provider is assigned to the connection, and then its description cannot be read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_that_storage_never_accepts_ends_with_its_socket() -> Result<()> {
    let (scene, sam, ada) = scene().await?;
    let outages = ["LOCK TABLE providers IN ACCESS EXCLUSIVE MODE", "LOCK TABLE invocations IN ACCESS EXCLUSIVE MODE"];
    for (seq, outage) in (2..).zip(outages) {
        let (node, mut socket) = connect(&ada).await?;
        let held = scene.database.lock(outage).await?;
        register(&node, &socket).await?;
        assert_eq!(socket.closed(SOON).await?, Some(1013), "{outage}");
        if let Ok(frame) = socket.next_frame(Duration::ZERO).await {
            bail!("{outage}: {frame}");
        }
        held.rollback().await?;
        wait::until("the provider to be given back", SOON, || async {
            scene.database.is_connected(&node.node_id).await.is_ok_and(|connected| !connected)
        })
        .await;
        let text = format!("mail {seq}");
        scene.dm(&sam, 0, "ada", &text).await?;
        let (node, socket) = connect(&ada).await?;
        register(&node, &socket).await?;
        assert_eq!(received(&ada, socket, seq).await?.last(), Some(&json!(text)));
    }
    Ok(())
}
