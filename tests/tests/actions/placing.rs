//! Placement of invocations, and queues for offline providers.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, Result};
use relay_acceptance::calls::{CallScene, SOON, next_invocation, register, report_unable, send_result, socket};
use relay_testkit::{shared, wait};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn a_burst_spreads_evenly_and_no_node_exceeds_its_capacity() -> Result<()> {
    let place = CallScene::new("burst").await?;
    let capacity = json!([{ "name": "grind", "kind": "capacity" }]);
    let mut sockets = Vec::new();
    for n in 0..4 {
        let node = place.node(&format!("mill-{n}")).await?;
        let mut socket = socket(&node, n % 2).await?;
        socket.request(register(&node, "miller", &capacity, 10)).await?;
        sockets.push(socket);
    }
    let gateways = &shared().await.gateways;
    let calls = (0..44).map(|n| {
        let api = place.ann().at(&gateways[n % 2]);
        async move { api.post("/v1/actions/grind/invoke", json!({})).await }
    });
    let answers = futures::future::try_join_all(calls).await?;
    let placed: Vec<String> = answers
        .iter()
        .filter(|answer| answer.is_success())
        .map(|answer| answer.data()["dispatched_node_id"].as_str().unwrap_or_default().to_owned())
        .collect();
    let mut counts = BTreeMap::new();
    placed.iter().for_each(|node| *counts.entry(node).or_insert(0) += 1);
    assert_eq!((counts.len(), counts.values().copied().collect::<Vec<i32>>()), (4, vec![10; 4]));
    let refused: Vec<_> = answers.iter().filter(|answer| !answer.is_success()).collect();
    assert_eq!(refused.len(), 4);
    for answer in refused {
        assert_eq!((answer.status, answer.code()), (503, "handler_unavailable"), "{}", answer.body);
        assert!(answer.body.to_string().contains("full"), "the reason is told: {}", answer.body);
    }
    let done = next_invocation(&mut sockets[0], SOON).await?;
    send_result(&sockets[0], &done, json!({})).await?;
    place.wait_for_outcome("grind", &done).await?;
    let next = place.invoke("grind", json!({})).await?;
    let row = place.invocation("grind", &next).await?;
    let skipped = row["placements"][0]["skipped"].as_array().context("reasons")?;
    assert!(skipped.len() == 3 && skipped.iter().all(|skip| skip["reason"] == "full"), "{row}");
    Ok(())
}

#[tokio::test]
async fn a_reconnecting_node_keeps_its_reservations() -> Result<()> {
    let place = CallScene::new("room").await?;
    let node = place.node("mill").await?;
    // With this capability, agents return when an inventory names them, not before.
    let capabilities = json!([
        { "name": "grind", "kind": "capacity" }, { "name": "relay:delivery-cursor-v1", "kind": "capacity" },
    ]);
    let beat = |active: u32| json!({ "v": 1, "type": "node.heartbeat", "load": 0.5, "active_agents": active, "handlers_live": true });
    let mut first = socket(&node, 0).await?;
    first.request(register(&node, "miller", &capabilities, 2)).await?;
    for name in ["east", "west"] {
        first.register_agent(name).await?;
    }
    first.send_json(&beat(2)).await?;
    let shows = |field: &'static str, wanted: Value| {
        let key = place.key.clone();
        async move {
            wait::until(&format!("{field} to be {wanted}"), SOON, || async {
                key.get("/v1/nodes/mill").await.is_ok_and(|reply| reply.data()["providers"][0][field] == wanted)
            })
            .await;
        }
    };
    shows("active_agents", json!(2)).await;
    first.close().await?;
    shows("live", json!(false)).await;
    let mut second = socket(&node, 1).await?;
    second.request(register(&node, "miller", &capabilities, 2)).await?;
    let refused = place.ann().post("/v1/actions/grind/invoke", json!({})).await?;
    let refused = refused.refused(503, "handler_unavailable")?;
    assert!(refused.body.to_string().contains("full"), "{}", refused.body);
    second.send_json(&beat(1)).await?;
    shows("active_agents", json!(1)).await;
    let id = place.invoke("grind", json!({})).await?;
    assert_eq!(next_invocation(&mut second, SOON).await?, id);
    Ok(())
}

#[tokio::test]
async fn an_invocation_that_a_node_cannot_perform_moves_to_another_and_eventually_fails() -> Result<()> {
    let place = CallScene::new("handed-back").await?;
    let capacity = json!([{ "name": "grind", "kind": "capacity" }]);
    let (mut nodes, mut sockets) = (Vec::new(), Vec::new());
    for (gateway, name) in ["east", "west"].into_iter().enumerate() {
        let node = place.node(name).await?;
        let mut socket = socket(&node, gateway).await?;
        socket.request(register(&node, "miller", &capacity, 1)).await?;
        nodes.push(node);
        sockets.push(socket);
    }
    let shown = |name: &str| {
        let (key, path) = (place.key.clone(), format!("/v1/nodes/{name}"));
        async move { key.get(&path).await?.success() }
    };
    let ack = place.ann().post("/v1/actions/grind/invoke", json!({})).await?.success()?;
    let id = ack["invocation_id"].as_str().context("an id")?;
    let first = usize::from(ack["dispatched_node_id"] != nodes[0].node_id.as_str());
    let second = 1 - first;
    assert_eq!(next_invocation(&mut sockets[first], SOON).await?, id);
    report_unable(&sockets[first], id).await?;
    assert_eq!(next_invocation(&mut sockets[second], SOON).await?, id, "the same invocation");
    for (nth, live) in [(first, false), (second, true)] {
        let node = shown(&nodes[nth].name).await?;
        assert_eq!((&node["live"], &node["handlers_live"]), (&json!(true), &json!(live)), "{node}");
    }
    send_result(&sockets[second], id, json!({ "by": "the other" })).await?;
    let row = place.wait_for_outcome("grind", id).await?;
    assert_eq!((&row["status"], &row["output"]), (&json!("completed"), &json!({ "by": "the other" })));

    // The last allowed hand-back fails the invocation.
    let id = place.invoke("grind", json!({})).await?;
    assert_eq!(next_invocation(&mut sockets[second], SOON).await?, id, "the first takes nothing any more");
    let database = sqlx::PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE invocations SET attempt = $2 WHERE invocation_id = $1")
        .bind(id.trim_start_matches("inv_").parse::<i64>()?)
        .bind(relay_domain::actions::MAX_HAND_BACKS)
        .execute(&database)
        .await?;
    report_unable(&sockets[second], &id).await?;
    let row = place.wait_for_outcome("grind", &id).await?;
    assert_eq!((&row["status"], &row["error"]), (&json!("failed"), &json!("handler_unavailable")));
    for node in &nodes {
        assert_eq!(shown(&node.name).await?["reserved_agents"], 0);
    }
    Ok(())
}

#[tokio::test]
async fn queueable_invocations_wait_for_their_node_and_others_are_refused() -> Result<()> {
    let place = CallScene::new("waiting").await?;
    let node = place.node("box").await?;
    let capabilities = json!([
        { "name": "patient", "kind": "action", "global": true, "queue": true },
        { "name": "hasty", "kind": "action", "global": true },
    ]);
    let mut first = socket(&node, 1).await?;
    first.request(register(&node, "p", &capabilities, 0)).await?;
    first.close().await?;
    wait::until("the node to be unavailable", SOON, || async {
        place.key.get("/v1/nodes/box").await.is_ok_and(|reply| reply.data()["live"] == false)
    })
    .await;
    place.ann().post("/v1/actions/hasty/invoke", json!({})).await?.refused(503, "handler_unavailable")?;
    let id = place.invoke("patient", json!({})).await?;
    let row = place.invocation("patient", &id).await?;
    assert_eq!((&row["status"], &row["dispatched_node_id"]), (&json!("pending"), &Value::Null));
    assert_eq!(row["placements"][0]["skipped"][0]["reason"], "not_live", "{row}");
    let mut second = socket(&node, 0).await?;
    second.request(register(&node, "p", &capabilities, 0)).await?;
    assert_eq!(next_invocation(&mut second, SOON).await?, id);
    send_result(&second, &id, json!({ "at": "last" })).await?;
    assert_eq!(place.wait_for_outcome("patient", &id).await?["status"], "completed");
    Ok(())
}

#[tokio::test]
async fn at_most_a_hundred_invocations_wait_for_a_provider() -> Result<()> {
    let place = CallScene::new("queue").await?;
    let node = place.node("mill").await?;
    let queued = json!([{ "name": "grind", "kind": "action", "queue": true }]);
    let mut miller = socket(&node, 0).await?;
    miller.request(register(&node, "miller", &queued, 0)).await?;
    miller.close().await?;
    let mut beside = socket(&node, 1).await?;
    let baked = json!([{ "name": "bake", "kind": "action", "queue": true }]);
    beside.request(register(&node, "baker", &baked, 0)).await?;
    beside.close().await?;
    wait::until("the node to be unavailable", SOON, || async {
        place.key.get("/v1/nodes/mill").await.is_ok_and(|reply| reply.data()["live"] == false)
    })
    .await;
    let (api, path) = (place.ann(), "/v1/nodes/mill/actions/grind/invoke");
    let gateways = &shared().await.gateways;
    let calls = (0..120).map(|n| {
        let api = api.at(&gateways[n % 2]);
        async move { api.post(path, json!({})).await }
    });
    let answers = futures::future::try_join_all(calls).await?;
    let refused: Vec<_> = answers.iter().filter(|answer| !answer.is_success()).collect();
    for answer in &refused {
        assert_eq!((answer.status, answer.code()), (503, "handler_unavailable"), "{}", answer.body);
    }
    assert_eq!(refused.len(), 20);
    // Every provider has its own queue of a hundred.
    let bread = place.ann().post("/v1/nodes/mill/actions/bake/invoke", json!({})).await?.success()?;
    assert_eq!(bread["status"], "pending");
    let mut back = socket(&node, 1).await?;
    back.request(register(&node, "miller", &queued, 0)).await?;
    let mut done = BTreeSet::new();
    while done.len() < 100 {
        let id = next_invocation(&mut back, SOON).await?;
        send_result(&back, &id, json!({})).await?;
        done.insert(id);
    }
    Ok(())
}

#[tokio::test]
async fn an_action_name_has_one_handler_and_the_default_provider_yields() -> Result<()> {
    let place = CallScene::new("names").await?;
    let (east, west) = (place.node("east").await?, place.node("west").await?);
    let mut at_east = socket(&east, 0).await?;
    let global = json!([{ "name": "build", "kind": "action", "global": true }]);
    at_east.request(register(&east, "p", &global, 0)).await?;
    let mut at_west = socket(&west, 1).await?;
    let refused = at_west.request(register(&west, "p", &global, 0)).await;
    assert!(refused.is_err_and(|error| error.to_string().contains("action_name_conflict")), "explicit claims conflict");
    let quiet = json!([{ "name": "build", "kind": "action" }]);
    at_west.request(register(&west, "default", &quiet, 0)).await?;
    // The node's own route selects its action, the name selects the first one.
    let by_name = place.invoke("build", json!({})).await?;
    assert_eq!(next_invocation(&mut at_east, SOON).await?, by_name);
    let of_west = place.ann().post("/v1/nodes/west/actions/build/invoke", json!({})).await?.success()?;
    assert_eq!(next_invocation(&mut at_west, SOON).await?, of_west["invocation_id"].as_str().unwrap_or_default());
    // Actions handled by a node have no agent; clients that do not accept null get an empty one.
    let shown = |client: &'static str| {
        let key = place.key.clone();
        async move {
            let who = [("x-relaycast-origin-client", client)];
            key.call(Method::GET, "/v1/actions/build", None, &who).await?.success()
        }
    };
    for (client, agent) in [
        ("@relaycast/sdk-rust", json!("")),
        ("agent-relay-broker", json!("")),
        ("@relaycast/sdk", Value::Null),
        ("@relaycast/python-sdk", Value::Null),
        ("mine", Value::Null),
    ] {
        assert_eq!(shown(client).await?["handler_agent"], agent, "{client}");
    }
    // The name is released when its provider advertises other capabilities.
    at_east.request(register(&east, "p", &json!([]), 0)).await?;
    place.ann().post("/v1/nodes/east/actions/build/invoke", json!({})).await?.refused(404, "action_not_found")?;
    let missing = json!({ "name": "paint", "description": "", "handler_node": "west" });
    place.key.post("/v1/actions", missing).await?.refused(409, "capability_mismatch")?;
    for reserved in ["spawn", "release", "relay:x"] {
        let body = json!({ "name": reserved, "description": "", "handler_agent": "ann" });
        place.ann().post("/v1/actions", body).await?.refused(409, "action_name_conflict")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_provider_that_yielded_a_name_gets_no_invocations_of_it() -> Result<()> {
    let place = CallScene::new("yields").await?;
    let node = place.node("duo").await?;
    let build = json!([{ "name": "build", "kind": "action" }]);
    let (mut first, mut second) = (socket(&node, 0).await?, socket(&node, 1).await?);
    first.request(register(&node, "p", &build, 0)).await?;
    second.request(register(&node, "default", &build, 0)).await?;
    let invoke = async || place.ann().post("/v1/nodes/duo/actions/build/invoke", json!({})).await;
    for _ in 0..8 {
        let id = invoke().await?.success()?["invocation_id"].clone();
        assert_eq!(json!(next_invocation(&mut first, SOON).await?), id);
    }
    // Its `queue` setting is ignored too: the provider that owns the name did not set it.
    first.close().await?;
    wait::until_ok("it to be unavailable", SOON, || async { invoke().await?.refused(503, "handler_unavailable") })
        .await?;
    let asked = second.expect_where("it", Duration::from_secs(1), |frame| frame["type"] == "action.invoke").await;
    assert!(asked.is_err(), "{asked:?}");
    Ok(())
}

#[tokio::test]
async fn a_capacity_is_not_shadowed_by_an_action_of_that_name() -> Result<()> {
    let place = CallScene::new("namesakes").await?;
    let (east, west) = (place.node("east").await?, place.node("west").await?);
    let (mut at_east, mut at_west) = (socket(&east, 0).await?, socket(&west, 1).await?);
    at_east.request(register(&east, "p", &json!([{ "name": "grind", "kind": "capacity" }]), 0)).await?;
    at_west.request(register(&west, "p", &json!([{ "name": "grind", "kind": "action" }]), 0)).await?;
    // The load of east makes west preferable.
    for _ in 0..4 {
        let id = place.invoke("grind", json!({})).await?;
        assert_eq!(next_invocation(&mut at_east, SOON).await?, id);
    }
    let of_west = place.ann().post("/v1/nodes/west/actions/grind/invoke", json!({})).await?.success()?;
    assert_eq!(json!(next_invocation(&mut at_west, SOON).await?), of_west["invocation_id"]);
    Ok(())
}

/// Two providers serve one node: one can spawn, the other wraps it and requests the spawn itself.
#[tokio::test]
async fn a_wrapping_provider_gets_no_invocations_of_its_own_spawn() -> Result<()> {
    let place = CallScene::new("wrapper").await?;
    let node = place.node("box").await?;
    let of_kind = |kind: &str| json!([{ "name": "spawn:sh", "kind": kind }]);
    let spawn = || json!({ "v": 1, "type": "node.spawn", "input": { "name": "child", "cli": "sh" } });
    let mut wrapper = socket(&node, 0).await?;
    wrapper.request(register(&node, "wrapper", &of_kind("action"), 0)).await?;
    let error = wrapper.request(spawn()).await.unwrap_err().to_string();
    assert!(error.contains("capability_mismatch"), "an action of that name is no capacity: {error}");

    // The load of the inner provider makes the wrapper preferable.
    let mut inner = socket(&node, 1).await?;
    inner.request(register(&node, "inner", &of_kind("capacity"), 0)).await?;
    for _ in 0..4 {
        let ack = wrapper.request(spawn()).await?;
        assert_eq!(json!(next_invocation(&mut inner, SOON).await?), ack["invocation_id"]);
    }

    // Queued invocations are placed by the same rule. Those in progress are sent again.
    inner.close().await?;
    wait::until_ok("the capacity to be unavailable", SOON, || async {
        let row = place.key.get("/v1/nodes/box").await?.success()?;
        let mut providers = row["providers"].as_array().into_iter().flatten();
        let inner = providers.find(|provider| provider["name"] == "inner");
        anyhow::ensure!(inner.is_some_and(|inner| inner["live"] == false), "{row}");
        anyhow::Ok(())
    })
    .await?;
    let ack = wrapper.request(spawn()).await?;
    assert_eq!(ack["status"], "pending", "{ack}");
    let mut back = socket(&node, 1).await?;
    back.request(register(&node, "inner", &of_kind("capacity"), 0)).await?;
    let waited = |frame: &Value| frame["invocation_id"] == ack["invocation_id"];
    back.expect_where("what waited", SOON, waited).await?;
    Ok(())
}
