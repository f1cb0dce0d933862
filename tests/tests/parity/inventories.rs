//! Inventories of other nodes while an agent's own node is temporarily unavailable.

use anyhow::Result;
use relay_acceptance::{room::text, spawning::SOON};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared, wait,
};
use serde_json::json;
use sqlx::PgPool;

async fn connect(key: &Api, gateway: usize, name: &str) -> Result<NodeSocket> {
    let id = format!("node_{name}");
    let node = key.create_broker_node(&id, name).await?;
    let at = key.at(&shared().await.gateways[gateway]);
    let mut socket = NodeSocket::connect(&at.ws_base(), &node.token).await?;
    socket.register_broker(&id, name, "run-1").await?;
    Ok(socket)
}

async fn goes_offline(key: &Api, node: &str) {
    wait::until("the node to be offline", SOON, || async {
        key.get(&format!("/v1/nodes/{node}")).await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
}

#[tokio::test]
async fn an_inventory_does_not_take_an_agent_whose_node_is_briefly_unavailable() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "inventory-away").await?;
    let mut first = connect(&key, 0, "first").await?;
    let mut second = connect(&key, 1, "second").await?;
    let kept = first.register_agent("kept").await?;
    let own = second.register_agent("own").await?;
    let (kept, own) = (text(&kept["agent_id"]).to_owned(), text(&own["agent_id"]).to_owned());
    first.inventory(&[(&kept, "kept")]).await?;
    first.close().await?;
    goes_offline(&key, "first").await;
    let synced = second.inventory(&[(&own, "own"), (&kept, "kept")]).await?;
    let entry = json!([{ "agent_id": kept, "name": "kept", "code": "agent_location_conflict" }]);
    assert_eq!((&synced["rejected_agents"], &synced["rejected"]), (&json!(1), &entry), "{synced}");
    // Alone it is no error either, on which a broker would drop its socket.
    let synced = second.inventory(&[(&kept, "kept")]).await?;
    assert_eq!((&synced["rejected_agents"], &synced["rejected"]), (&json!(1), &entry), "{synced}");
    let bindings = key.get("/v1/nodes/first/agents").await?.success()?;
    assert_eq!(text(&bindings[0]["agent_name"]), "kept", "{bindings}");
    second.inventory(&[(&own, "own")]).await?;
    // It returns, over the other gateway.
    let mut first = connect(&key, 1, "first").await?;
    let synced = first.inventory(&[(&kept, "kept")]).await?;
    assert_eq!((&synced["rebound_agents"], &synced["rejected_agents"]), (&json!(1), &json!(0)), "{synced}");
    first.close().await?;
    goes_offline(&key, "first").await;
    // It does not return: from then on the agent may be listed elsewhere.
    let pool = PgPool::connect(&shared().await.database_url).await?;
    let workspace: i64 = text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?;
    sqlx::query(
        "UPDATE providers SET disconnected_at = now() - interval '121 seconds'
          WHERE workspace_id = $1 AND node_id = 'node_first'",
    )
    .bind(workspace)
    .execute(&pool)
    .await?;
    let synced = second.inventory(&[(&own, "own"), (&kept, "kept")]).await?;
    assert_eq!(synced["rejected_agents"], 0, "{synced}");
    let bindings = key.get("/v1/nodes/second/agents").await?.success()?;
    assert_eq!(bindings.as_array().map(Vec::len), Some(2), "{bindings}");
    Ok(())
}
