//! Suspended workspaces and drained nodes.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use relay_acceptance::relayctl::relayctl;
use relay_testkit::{
    client::{Api, ConnectError, NodeSocket},
    shared, wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_suspended_workspace_is_refused_and_loses_nothing() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "suspended").await?;
    let id = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    let node = key.as_agent(&bob).direct_node_token().await?;
    let mut socket = NodeSocket::connect(&key.at(&gateways[1]).ws_base(), &node.token).await?;
    socket.register_direct(&node.node_id, &node.name).await?;
    let neighbour = Api::create_workspace(&gateways[0], "neighbour of a suspended one").await?;

    let done = relayctl(&["--json", "workspace", "suspend", &id]).await?.json()?;
    assert_eq!((&done["suspended"], &done["changed"]), (&json!(true), &json!(true)));
    // On all gateways, with any token; open sockets are closed with a code that makes clients reconnect later.
    for base in gateways {
        for api in [key.at(base), key.at(base).as_agent(&ada)] {
            wait::until_ok("the workspace to be closed", SOON, || async {
                api.get("/v1/channels").await?.refused(423, "workspace_suspended").map(drop)
            })
            .await?;
        }
    }
    assert_eq!(socket.closed(SOON).await?, Some(1013));
    match NodeSocket::connect(&key.ws_base(), &node.token).await {
        Err(ConnectError::Refused { status: 503, body }) if body.contains("workspace_suspended") => {}
        other => bail!("a socket of a suspended workspace: {other:?}"),
    }
    neighbour.get("/v1/channels").await?.success()?;
    let again = relayctl(&["--json", "workspace", "suspend", &id]).await?.json()?;
    assert_eq!(again["changed"], json!(false));
    let listed = relayctl(&["workspace", "list", "--limit", "10000"]).await?.expect_success()?.stdout;
    let own = listed.lines().find(|line| line.contains(&id)).unwrap_or_default();
    assert!(own.contains("suspended 20"), "{own}");

    relayctl(&["workspace", "resume", &id]).await?.expect_success()?;
    wait::until_ok("the workspace to be open", SOON, || async {
        key.as_agent(&ada).dm("bob", "still here").await?.success().map(drop)
    })
    .await?;
    let mut socket = wait::until_ok("a socket", SOON, || async {
        let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        socket.register_direct(&node.node_id, &node.name).await?;
        anyhow::Ok(socket)
    })
    .await?;
    let frame = socket.expect("deliver").await?;
    assert_eq!(frame["payload"]["data"]["text"], "still here");
    Ok(())
}

#[tokio::test]
async fn a_child_workspace_is_suspended_with_its_creator() -> Result<()> {
    let base = shared().await.any_gateway();
    let creator = Api::create_workspace(base, "creator").await?;
    let id = text(&creator.get("/v1/workspace").await?.success()?["id"]).to_owned();
    let mut children = Vec::new();
    for name in ["follows", "suspended itself"] {
        let made = creator.post("/v1/workspaces", json!({ "name": name })).await?.success()?;
        let child = creator.with_token(text(&made["api_key"]));
        let id = text(&child.get("/v1/workspace").await?.success()?["id"]).to_owned();
        children.push((child, id));
    }
    let [(follows, _), (held, held_id)] = children.as_slice() else { bail!("two children") };
    let refused =
        |key: Api| async move { key.get("/v1/channels").await?.refused(423, "workspace_suspended").map(drop) };
    let served = |key: Api| async move { key.get("/v1/channels").await?.success().map(drop) };

    relayctl(&["workspace", "suspend", held_id]).await?.expect_success()?;
    wait::until_ok("the child to be closed", SOON, || refused(held.clone())).await?;
    served(follows.clone()).await?;
    relayctl(&["workspace", "suspend", &id]).await?.expect_success()?;
    wait::until_ok("the other child to be closed", SOON, || refused(follows.clone())).await?;
    // The end of the creator's suspension is not that of the child's own.
    relayctl(&["workspace", "resume", &id]).await?.expect_success()?;
    wait::until_ok("the other child to be open", SOON, || served(follows.clone())).await?;
    refused(held.clone()).await?;
    Ok(())
}

#[tokio::test]
async fn a_drained_node_gets_nothing_new_and_cannot_connect_until_undrained() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "drained").await?;
    let id = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
    let ann = key.register_agent("ann").await?;
    let mut sockets = Vec::new();
    for name in ["goes", "stays"] {
        let node = key.create_broker_node(&format!("node_{}", uuid::Uuid::new_v4().simple()), name).await?;
        let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        let register = json!({
            "v": 1, "type": "node.register", "name": node.name, "node_id": node.node_id,
            "capabilities": [{ "name": "grind", "kind": "capacity" }],
            "provider": { "name": "miller", "instance_id": format!("of-{}", node.node_id) },
            "max_agents": 10, "tags": [], "version": "test/1",
        });
        socket.request(register).await?;
        sockets.push((node, socket));
    }
    let (goes, mut leaving) = sockets.remove(0);
    let (stays, _kept) = sockets.remove(0);

    let done = relayctl(&["--json", "node", "drain", "--workspace", &id, "goes"]).await?.json()?;
    assert_eq!((text(&done["node_id"]), &done["drained"]), (goes.node_id.as_str(), &json!(true)));
    assert_eq!(leaving.closed(SOON).await?, Some(1013));
    match NodeSocket::connect(&key.ws_base(), &goes.token).await {
        Err(ConnectError::Refused { status: 503, body }) if body.contains("node_drained") => {}
        other => bail!("a socket of a drained node: {other:?}"),
    }
    for _ in 0..4 {
        let invoked = key.as_agent(&ann).post("/v1/actions/grind/invoke", json!({})).await?.success()?;
        assert_eq!(text(&invoked["dispatched_node_id"]), stays.node_id);
    }
    relayctl(&["node", "undrain", "--workspace", &id, "goes"]).await?.expect_success()?;
    wait::until_ok("the node to be let in again", SOON, || async {
        let connected = NodeSocket::connect(&key.ws_base(), &goes.token).await;
        ensure!(connected.is_ok(), "{:?}", connected.err());
        anyhow::Ok(())
    })
    .await?;
    let nobody = relayctl(&["node", "drain", "--workspace", &id, "nobody"]).await?;
    assert!(!nobody.success && nobody.stderr.contains("nobody"), "{}", nobody.stderr);
    Ok(())
}
