//! Actions from call to outcome, over two gateways.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    shared,
};
use reqwest::Method;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

/// Workspace with a node `box` at the second gateway and an agent `ann` at the first.
struct InvocationScene {
    key: Api,
    ann: Agent,
    node_id: String,
}

impl InvocationScene {
    async fn new(name: &str) -> Result<Self> {
        let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
        let ann = key.register_agent("ann").await?;
        Ok(Self { key, ann, node_id: format!("node_{}", uuid::Uuid::new_v4().simple()) })
    }

    fn ann(&self) -> Api {
        self.key.as_agent(&self.ann)
    }

    /// Registers a provider at the second gateway.
    async fn provider(&self, node: &str, provider: Option<&str>, capabilities: Value) -> Result<NodeSocket> {
        let token = self.key.create_broker_node(&format!("{}_{node}", self.node_id), node).await?;
        self.register(&token.token, &token.node_id, node, provider, capabilities).await
    }

    async fn register(
        &self,
        token: &str,
        node_id: &str,
        name: &str,
        provider: Option<&str>,
        capabilities: Value,
    ) -> Result<NodeSocket> {
        let at = self.key.at(&shared().await.gateways[1]);
        let mut socket = NodeSocket::connect(&at.ws_base(), token).await?;
        let mut frame = json!({
            "v": 1, "type": "node.register", "name": name, "node_id": node_id, "capabilities": capabilities,
            "max_agents": 0, "tags": [], "version": "test/1",
        });
        if let Some(provider) = provider {
            frame["provider"] = json!({ "name": provider, "instance_id": uuid::Uuid::new_v4().to_string() });
        }
        socket.request(frame).await?;
        Ok(socket)
    }

    async fn invocation(&self, action: &str, id: &str, query: &str) -> Result<Value> {
        self.key.get(&format!("/v1/actions/{action}/invocations/{id}{query}")).await?.success()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

async fn next_notice(caller: &mut NodeSocket, kind: &str) -> Result<Value> {
    next_notice_within(caller, kind, SOON).await
}

async fn next_notice_within(caller: &mut NodeSocket, kind: &str, within: Duration) -> Result<Value> {
    let frame = caller.expect_where(kind, within, |frame| frame["payload"]["type"] == kind).await?;
    assert_eq!((&frame["type"], &frame["seq"]), (&json!("deliver"), &json!(0)), "{frame}");
    Ok(frame["payload"]["data"].clone())
}

#[tokio::test]
async fn a_node_performs_an_action_and_the_caller_is_notified_once() -> Result<()> {
    let place = InvocationScene::new("actions").await?;
    let mut node = place.provider("box", None, json!([{ "name": "build", "kind": "action" }])).await?;
    let mut caller = place.ann().direct_socket().await?;

    let ack = place.ann().post("/v1/actions/build/invoke", json!({ "input": { "ref": "main" } })).await?;
    assert_eq!(ack.status, 201, "{}", ack.body);
    let ack = ack.success()?;
    let id = text(&ack["invocation_id"]).to_owned();
    assert!(id.starts_with("inv_"), "{ack}");
    assert_eq!((&ack["status"], &ack["input"]), (&json!("dispatched"), &json!({ "ref": "main" })));

    let frame = node.expect("action.invoke").await?;
    let wanted =
        json!({ "v": 1, "type": "action.invoke", "invocation_id": id, "action": "build", "input": { "ref": "main" } });
    assert_eq!(frame, wanted, "no key more: strict clients drop the frame");
    node.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": { "ok": true } })).await?;
    let outcome = next_notice(&mut caller, "action.completed").await?;
    assert_eq!(
        outcome,
        json!({ "invocation_id": id, "action_name": "build", "status": "completed", "output": { "ok": true }, "error": null })
    );
    // A second result is ignored without an answer.
    node.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "error": "late" })).await?;
    node.request(json!({ "v": 1, "type": "inventory.sync", "agents": [] })).await?;
    let row = place.invocation("build", &id, "?explain=true").await?;
    assert_eq!(
        (&row["status"], &row["output"], &row["error"]),
        (&json!("completed"), &json!({ "ok": true }), &Value::Null)
    );
    assert_eq!((text(&row["caller_name"]), text(&row["caller_id"])), ("ann", &*place.ann.id));
    assert_eq!(text(&row["placements"][0]["chosen"]["node"]), "box", "{row}");
    assert!(row["duration_ms"].is_i64() && row["completed_at"].is_string(), "{row}");
    assert!(place.invocation("build", &id, "").await?.get("placements").is_none());
    Ok(())
}

#[tokio::test]
async fn only_the_handling_agent_completes_its_action() -> Result<()> {
    let place = InvocationScene::new("agent-actions").await?;
    let bob = place.key.register_agent("bob").await?;
    let as_bob = place.key.as_agent(&bob).at(&shared().await.gateways[1]);
    let schema = json!({ "type": "object", "required": ["n"], "properties": { "n": { "type": "integer" } } });
    let body = json!({ "name": "double", "description": "twice", "handler_agent": "bob", "input_schema": schema });
    place.ann().post("/v1/actions", body.clone()).await?.refused(403, "forbidden")?;
    let made = as_bob.post("/v1/actions", body.clone()).await?;
    assert_eq!(made.status, 201, "{}", made.body);
    assert_eq!(as_bob.post("/v1/actions", body).await?.status, 200, "the same handler changes it");
    let taken = json!({ "name": "double", "description": "", "handler_agent": "ann" });
    place.ann().post("/v1/actions", taken).await?.refused(409, "action_name_conflict")?;

    let invoke = "/v1/actions/double/invoke";
    let refused = place.ann().post(invoke, json!({ "input": { "n": "2" } })).await?;
    let refused = refused.refused(400, "invalid_action_input")?;
    assert!(text(&refused.body["error"]["message"]).starts_with("input/n: "), "{}", refused.body);
    place.key.post(invoke, json!({ "input": { "n": 2 } })).await?.refused(403, "agent_token_required")?;
    as_bob.post("/v1/actions", json!({ "name": "any", "description": "", "handler_agent": "bob" })).await?.success()?;
    let eve = place.key.as_agent(&place.key.register_agent("eve").await?);
    for input in [json!(7), json!("n"), json!([{ "n": 2 }]), json!(false)] {
        let asked = eve.post("/v1/actions/any/invoke", json!({ "input": input })).await?;
        asked.refused(400, "invalid_action_input")?;
    }
    let given = eve.post("/v1/actions/any/invoke", json!({ "input": null })).await?.success()?;
    assert_eq!(given["input"], json!({}), "nothing is an object without fields");
    let complete = format!("/v1/actions/any/invocations/{}/complete", text(&given["invocation_id"]));
    as_bob.post(&complete, json!({})).await?.success()?;

    let mut caller = place.ann().direct_socket().await?;
    let mut handler = as_bob.direct_socket().await?;
    let ack = place.ann().post(invoke, json!({ "input": { "n": 2 } })).await?.success()?;
    let id = text(&ack["invocation_id"]);
    assert_eq!((text(&ack["status"]), text(&ack["handler_agent_id"])), ("invoked", &*bob.id));
    let frame = handler.expect("action.invoke").await?;
    assert_eq!((text(&frame["agent_id"]), text(&frame["agent_name"])), (&*bob.id, "bob"));
    let complete = format!("/v1/actions/double/invocations/{id}/complete");
    place.ann().post(&complete, json!({ "output": 3 })).await?.refused(403, "forbidden")?;
    let done = as_bob.post(&complete, json!({ "output": 4, "duration_ms": 12.4 })).await?.success()?;
    assert_eq!((&done["status"], &done["output"], &done["duration_ms"]), (&json!("completed"), &json!(4), &json!(12)));
    // Also if it answers before the gateway has recorded that it got the invocation.
    assert!(done["dispatched_at"].is_string(), "{done}");
    assert!(text(&done["dispatched_node_id"]).starts_with("node_direct_"), "{done}");
    assert_eq!(place.invocation("double", id, "").await?["output"], 4);
    // The Rust client and frames know objects only.
    let wrapped = json!({ "value": 4 });
    let rust = [("x-relaycast-origin-client", "@relaycast/sdk-rust")];
    let path = format!("/v1/actions/double/invocations/{id}");
    let read = place.key.call(Method::GET, &path, None, &rust).await?.success()?;
    assert_eq!(read["output"], wrapped);
    assert_eq!(next_notice(&mut caller, "action.completed").await?["output"], wrapped);
    let again = as_bob.post(&complete, json!({ "error": "changed my mind" })).await?.success()?;
    assert_eq!(again, done, "the first outcome counts");
    assert_eq!(as_bob.delete("/v1/actions/double").await?.status, 204);
    place.ann().post(invoke, json!({})).await?.refused(404, "action_not_found")?;
    Ok(())
}

#[tokio::test]
async fn an_agent_without_access_does_not_see_an_action_and_is_refused() -> Result<()> {
    let place = InvocationScene::new("denied").await?;
    let bob = place.key.register_agent("bob").await?;
    let as_bob = place.key.as_agent(&bob);
    let body = json!({ "name": "secret", "description": "", "handler_agent": "bob", "available_to": ["carl"] });
    as_bob.post("/v1/actions", body).await?.success()?;
    let mut caller = place.ann().direct_socket().await?;
    place.ann().get("/v1/actions/secret").await?.refused(404, "action_not_found")?;
    place.key.get("/v1/actions/secret").await?.refused(404, "action_not_found")?;
    assert_eq!(as_bob.get("/v1/actions/secret").await?.success()?["available_to"], json!(["carl"]));
    assert_eq!(place.ann().get("/v1/actions").await?.success()?, json!([]));
    // The frame is best-effort: a new socket may not be registered for its agent yet.
    let mut denied = None;
    for _ in 0..20 {
        place.ann().post("/v1/actions/secret/invoke", json!({})).await?.refused(403, "action_denied")?;
        denied = next_notice_within(&mut caller, "action.denied", Duration::from_secs(1)).await.ok();
        if denied.is_some() {
            break;
        }
    }
    let denied = denied.context("to be told of a denial")?;
    assert_eq!((text(&denied["action_name"]), text(&denied["caller_name"])), ("secret", "ann"));
    Ok(())
}

#[tokio::test]
async fn a_denial_that_cannot_be_recorded_is_answered_all_the_same() -> Result<()> {
    let place = InvocationScene::new("denied-unrecorded").await?;
    let bob = place.key.register_agent("bob").await?;
    let body = json!({ "name": "secret", "description": "", "handler_agent": "bob", "available_to": ["carl"] });
    place.key.as_agent(&bob).post("/v1/actions", body).await?.success()?;
    let database = sqlx::PgPool::connect(&shared().await.database_url).await?;
    let mut other = database.begin().await?;
    // The record needs the next number of the workspace's events, and waits 2 s for this lock.
    let events = "SELECT FROM event_heads h JOIN agents a USING (workspace_id) WHERE a.agent_id = $1 FOR UPDATE OF h";
    let locked = sqlx::query(events).bind(place.ann.id.parse::<i64>()?).execute(&mut *other).await?;
    assert_eq!(locked.rows_affected(), 1);
    let denied = place.ann().without_retries().post("/v1/actions/secret/invoke", json!({})).await?;
    denied.refused(403, "action_denied")?;
    other.rollback().await?;
    Ok(())
}

#[tokio::test]
async fn one_idempotency_key_creates_one_invocation() -> Result<()> {
    let place = InvocationScene::new("invoke-key").await?;
    let mut node = place.provider("box", None, json!([{ "name": "build", "kind": "action" }])).await?;
    let invoke = |input: i32| {
        let ann = place.ann();
        async move {
            let body = json!({ "input": { "n": input } });
            ann.call(Method::POST, "/v1/actions/build/invoke", Some(body), &[("Idempotency-Key", "once")]).await
        }
    };
    let (first, second) = tokio::try_join!(invoke(1), invoke(1))?;
    let first = first.success()?["invocation_id"].clone();
    assert_eq!(second.success()?["invocation_id"], first, "folded while the first is under way");
    let third = invoke(1).await?;
    assert_eq!(third.headers.get("idempotency-replayed").context("the header")?, "true");
    assert_eq!(third.success()?["invocation_id"], first);
    invoke(2).await?.refused(409, "idempotency_key_reused")?;
    node.expect("action.invoke").await?;
    let more = node.expect_where("a second frame", Duration::from_millis(300), |f| f["type"] == "action.invoke").await;
    assert!(more.is_err(), "{more:?}");

    // A repeated request is answered although the action has been deleted.
    let (ann, bob) = (place.ann(), place.key.as_agent(&place.key.register_agent("bob").await?));
    bob.post("/v1/actions", json!({ "name": "brief", "description": "", "handler_agent": "bob" })).await?.success()?;
    let brief = || ann.call(Method::POST, "/v1/actions/brief/invoke", Some(json!({})), &[("Idempotency-Key", "brief")]);
    let made = brief().await?.success()?;
    assert_eq!(bob.delete("/v1/actions/brief").await?.status, 204);
    ann.post("/v1/actions/brief/invoke", json!({})).await?.refused(404, "action_not_found")?;
    let again = brief().await?;
    assert_eq!(again.headers.get("idempotency-replayed").context("the header")?, "true");
    assert_eq!(again.success()?["invocation_id"], made["invocation_id"]);
    Ok(())
}

#[tokio::test]
async fn an_agents_record_names_the_actions_it_handles_and_may_invoke() -> Result<()> {
    let place = InvocationScene::new("records").await?;
    let bob = place.key.register_agent("bob").await?;
    let (ann, bob) = (place.ann(), place.key.as_agent(&bob));
    let define = |name: &str, handler: &str, for_whom: Value| json!({ "name": name, "description": "", "handler_agent": handler, "available_to": for_whom });
    for (name, handler, for_whom) in [
        ("open", "ann", Value::Null),
        ("for-bob", "ann", json!(["bob"])),
        ("own-secret", "ann", json!(["ann"])),
        ("by-bob", "bob", json!([])),
    ] {
        place.key.post("/v1/actions", define(name, handler, for_whom)).await?.success()?;
    }
    let _node = place.provider("box", None, json!([{ "name": "build" }])).await?;
    let lists = |record: Value| (record["actions_provided"].clone(), record["actions_available_to"].clone());
    let of = async |api: &Api, path: &str| anyhow::Ok(lists(api.get(path).await?.success()?));

    let anns = (json!(["for-bob", "open", "own-secret"]), json!(["build", "open", "own-secret"]));
    assert_eq!(of(&ann, "/v1/agent").await?, anns);
    assert_eq!(of(&place.key, "/v1/agents/ann").await?, anns);
    assert_eq!(of(&bob, "/v1/agents/ann").await?, (json!(["for-bob", "open"]), json!(["build", "open"])));
    assert_eq!(of(&place.key, "/v1/agents/bob").await?, (json!(["by-bob"]), json!(["build", "for-bob", "open"])));

    let observer = async |scopes: Value| {
        let made =
            place.key.post("/v1/observer-tokens", json!({ "name": scopes.to_string(), "scopes": scopes })).await?;
        anyhow::Ok(place.key.with_token(text(&made.success()?["token"])))
    };
    let nothing = (json!([]), json!([]));
    assert_eq!(of(&observer(json!(["agents:read"])).await?, "/v1/agents/ann").await?, nothing);
    assert_eq!(of(&observer(json!(["agents:read", "activity:read"])).await?, "/v1/agents/ann").await?, anns);

    ann.delete("/v1/actions/open").await?.success()?;
    assert_eq!(of(&ann, "/v1/agent").await?.0, json!(["for-bob", "own-secret"]));
    Ok(())
}
