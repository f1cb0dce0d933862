//! Messages of a session: those that an agent wrote while it was bound with the session's handle.

use anyhow::Result;
use relay_acceptance::room::{rows, text};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared,
};
use serde_json::{Value, json};

/// Registers an agent with a session, and returns a client of it at another gateway.
async fn host(key: &Api, socket: &mut NodeSocket, session: &str) -> Result<(Api, Value)> {
    let register = json!({ "v": 1, "type": "agent.register", "name": "worker", "session_ref": session });
    let hosted = socket.request(register).await?;
    Ok((key.with_token(text(&hosted["token"])), hosted["agent_id"].clone()))
}

async fn texts(key: &Api, path: &str) -> Result<Vec<String>> {
    let listed = key.get(path).await?.success()?;
    Ok(rows(&listed).iter().map(|message| text(&message["text"]).to_owned()).collect())
}

#[tokio::test]
async fn messages_belong_to_the_session_that_their_author_was_bound_with() -> Result<()> {
    let gateways = &shared().await.gateways;
    let at_first = Api::create_workspace(&gateways[0], "facts").await?;
    let key = at_first.at(&gateways[1]);
    let reader = key.register_agent("reader").await?;
    let token = at_first.create_broker_node("node_box", "box").await?;
    let mut socket = NodeSocket::connect(&at_first.ws_base(), &token.token).await?;
    socket.register_broker("node_box", "box", "run-1").await?;

    let (first, _) = host(&key, &mut socket, "run/1 a").await?;
    let root = first.post_message("general", "one").await?.success()?;
    first.dm("reader", "two").await?.success()?;
    let replies = format!("/v1/messages/{}/replies", text(&root["id"]));
    first.post(&replies, json!({ "text": "three" })).await?.success()?;
    key.as_agent(&reader).post_message("general", "not of the session").await?.success()?;

    // The same agent in another session; its earlier messages stay where they are.
    let (second, agent) = host(&key, &mut socket, "run-2").await?;
    second.post_message("general", "four").await?.success()?;
    let left = json!({ "v": 1, "type": "agent.deregister", "agent_id": agent });
    socket.request(left).await?;
    second.post_message("general", "of no session").await?.success()?;

    let of_first = "/v1/sessions/run%2F1%20a/messages";
    assert_eq!(texts(&key, of_first).await?, ["three", "two", "one"]);
    assert_eq!(texts(&at_first, "/v1/sessions/run-2/messages").await?, ["four"]);
    assert_eq!(texts(&key, "/v1/sessions/unknown/messages").await?, [""; 0]);

    let page = key.get(&format!("{of_first}?limit=2")).await?.success()?;
    assert_eq!(rows(&page).len(), 2);
    let oldest = format!("{of_first}?before={}", text(&rows(&page)[1]["id"]));
    assert_eq!(texts(&key, &oldest).await?, ["one"]);
    key.get(&format!("{of_first}?limit=0")).await?.refused(400, "invalid_request")?;
    key.as_agent(&reader).get(of_first).await?.refused(401, "unauthorized")?;
    let stranger = Api::create_workspace(&gateways[0], "facts").await?;
    assert_eq!(texts(&stranger, of_first).await?, [""; 0], "sessions are the workspace's own");
    Ok(())
}
