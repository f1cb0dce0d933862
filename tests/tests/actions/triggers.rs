//! Triggers: validation, and messages that invoke actions.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::Api;
use relay_testkit::stack::Stack;
use relay_testkit::{shared, wait};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::PgPool;

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_trigger_is_created_shown_updated_and_deleted() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "triggers").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let body = json!({ "channel": "#general", "pattern": "^deploy", "action_name": "deploy", "enabled": true });
    let created = ann.post("/v1/triggers", body).await?;
    assert_eq!(created.status, 201, "{}", created.body);
    let created = created.success()?;
    let id = text(&created["id"]);
    assert_eq!((text(&created["channel"]), text(&created["pattern"])), ("#general", "^deploy"), "as given");
    assert_eq!((&created["mention"], text(&created["action_name"])), (&Value::Null, "deploy"));
    assert_eq!(
        (&created["enabled"], &created["last_triggered_at"], &created["updated_at"]),
        (&json!(true), &Value::Null, &Value::Null)
    );
    let path = format!("/v1/triggers/{id}");
    assert_eq!(key.get(&path).await?.success()?, created);
    assert_eq!(key.get("/v1/triggers").await?.success()?, json!([created]));

    let changed = key.patch(&path, json!({ "channel": null, "mention": "@ann", "enabled": false })).await?.success()?;
    assert_eq!(
        (&changed["channel"], text(&changed["mention"]), text(&changed["pattern"])),
        (&Value::Null, "@ann", "^deploy")
    );
    assert_eq!((&changed["enabled"], changed["updated_at"].is_string()), (&json!(false), true));
    assert_eq!(key.patch(&path, json!({})).await?.success()?["mention"], "@ann");
    assert_eq!(key.delete(&path).await?.status, 204);
    for id in [&*path, "/v1/triggers/trg_7", "/v1/triggers/nonsense"] {
        key.get(id).await?.refused(404, "trigger_not_found")?;
        key.patch(id, json!({ "enabled": true })).await?.refused(404, "trigger_not_found")?;
        key.delete(id).await?.refused(404, "trigger_not_found")?;
    }
    for (body, code) in [
        (json!({}), "invalid_request"),
        (json!({ "action_name": "" }), "invalid_request"),
        (json!({ "action_name": "a", "pattern": "x".repeat(513) }), "invalid_request"),
        (json!({ "action_name": "a", "pattern": "(?:a{1000}){1000}" }), "invalid_request"),
        (json!({ "action_name": "a", "channel": "Not a channel" }), "invalid_channel_name"),
        (json!({ "action_name": "a", "mention": 7 }), "invalid_request"),
    ] {
        let reply = key.post("/v1/triggers", body.clone()).await?;
        assert_eq!((reply.status, reply.code()), (400, code), "{body}: {}", reply.body);
    }
    assert_eq!(key.get("/v1/triggers").await?.success()?, json!([]));
    Ok(())
}

/// Returns the inputs of an action's invocations, in order.
async fn inputs(pool: &PgPool, key: &Api, action: &str) -> Result<Vec<Value>> {
    let workspace = key.get("/v1/workspace").await?.success()?;
    let rows: Vec<Value> = sqlx::query_scalar(
        "SELECT input FROM invocations WHERE workspace_id = $1 AND action_name = $2 ORDER BY invocation_id",
    )
    .bind(text(&workspace["id"]).parse::<i64>()?)
    .bind(action)
    .fetch_all(pool)
    .await?;
    Ok(rows)
}

async fn texts(pool: &PgPool, key: &Api, action: &str) -> Result<Vec<String>> {
    let mut texts: Vec<String> =
        inputs(pool, key, action).await?.iter().map(|input| text(&input["text"]).to_owned()).collect();
    texts.sort();
    Ok(texts)
}

#[tokio::test]
async fn each_matching_message_invokes_the_action_once() -> Result<()> {
    let engine = shared().await;
    let pool = PgPool::connect(&engine.database_url).await?;
    let key = Api::create_workspace(&engine.gateways[0], "fire").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob).at(&engine.gateways[1]));
    ann.create_channel("builds").await?;
    bob.join("builds").await?;
    for action in ["by-channel", "by-pattern", "by-mention", "by-all", "off"] {
        bob.post("/v1/actions", json!({ "name": action, "description": "", "handler_agent": "bob" }))
            .await?
            .success()?;
    }
    ann.post_message("builds", "deploy @bob too early").await?.success()?;
    let mut ids = Vec::new();
    for body in [
        json!({ "channel": "#builds", "action_name": "by-channel" }),
        json!({ "pattern": "deploy \\d+", "action_name": "by-pattern" }),
        json!({ "mention": "bob", "action_name": "by-mention" }),
        json!({ "channel": "builds", "pattern": "deploy", "mention": "@bob", "action_name": "by-all" }),
        json!({ "action_name": "off", "enabled": false }),
        json!({ "channel": "builds", "action_name": "missing" }),
    ] {
        ids.push(text(&key.post("/v1/triggers", body).await?.success()?["id"]).to_owned());
    }
    let root = ann.post_message("builds", "deploy 1").await?.success()?;
    ann.post_message("general", "deploy 2").await?.success()?;
    bob.post_message("general", "hi @bob").await?.success()?;
    ann.post_message("builds", "please deploy, @bob").await?.success()?;
    let reply = format!("/v1/messages/{}/replies", text(&root["id"]));
    bob.post(&reply, json!({ "text": "deploy 3 in a thread" })).await?.success()?;
    ann.dm("bob", "deploy 4 @bob in private").await?.success()?;
    ann.post_message("general", "deploy 5 and the last").await?.success()?;

    wait::until_ok("the last message to have fired", SOON, || async {
        let last = texts(&pool, &key, "by-pattern").await?;
        anyhow::ensure!(last.iter().any(|text| text.contains("the last")), "{last:?}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    assert_eq!(texts(&pool, &key, "by-channel").await?, ["deploy 1", "deploy 3 in a thread", "please deploy, @bob"]);
    assert_eq!(
        texts(&pool, &key, "by-pattern").await?,
        ["deploy 1", "deploy 2", "deploy 3 in a thread", "deploy 5 and the last"]
    );
    assert_eq!(texts(&pool, &key, "by-mention").await?, ["hi @bob", "please deploy, @bob"]);
    assert_eq!(texts(&pool, &key, "by-all").await?, ["please deploy, @bob"]);
    assert!(texts(&pool, &key, "off").await?.is_empty());

    let input = &inputs(&pool, &key, "by-all").await?[0];
    assert_eq!(
        (text(&input["channel"]), text(&input["agent_name"]), &input["mentions"]),
        ("builds", "ann", &json!(["bob"]))
    );
    assert_eq!(text(&input["trigger_id"]), ids[3]);
    // The trigger's last match is recorded after the invocation.
    wait::until_ok("the triggers to tell", SOON, || async {
        let shown = key.get(&format!("/v1/triggers/{}", ids[3])).await?.success()?;
        anyhow::ensure!(shown["last_triggered_at"].is_string() && shown["last_error"].is_null(), "{shown}");
        let missing = key.get(&format!("/v1/triggers/{}", ids[5])).await?.success()?;
        anyhow::ensure!(missing["last_error"] == "action not found", "{missing}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;

    // An enabled trigger begins with the next message.
    key.patch(&format!("/v1/triggers/{}", ids[4]), json!({ "enabled": true })).await?.success()?;
    ann.post_message("general", "now").await?.success()?;
    wait::until("the next message to have fired", SOON, || async {
        texts(&pool, &key, "off").await.is_ok_and(|texts| texts == ["now"])
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn a_message_beyond_the_open_limit_fires_later() -> Result<()> {
    let engine = shared().await;
    let pool = PgPool::connect(&engine.database_url).await?;
    let key = Api::create_workspace(&engine.gateways[0], "full").await?;
    let bob = key.as_agent(&key.register_agent("bob").await?);
    bob.post("/v1/actions", json!({ "name": "count", "description": "", "handler_agent": "bob" })).await?.success()?;
    let trigger = key.post("/v1/triggers", json!({ "channel": "general", "action_name": "count" })).await?.success()?;
    let workspace: i64 = text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?;
    sqlx::query(
        "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, status,
                                  due_at, created_at)
         SELECT $1, n, 'count', 'nobody-can', 'x', '{}', 'pending', now() + interval '1 day', now()
           FROM generate_series(1, 2000) AS n",
    )
    .bind(workspace)
    .execute(&pool)
    .await?;
    bob.post_message("general", "first").await?.success()?;
    wait::until_ok("the trigger to say why not", SOON, || async {
        let shown = key.get(&format!("/v1/triggers/{}", text(&trigger["id"]))).await?.success()?;
        anyhow::ensure!(shown["last_error"].is_string(), "{shown}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    bob.post_message("general", "second").await?.success()?;
    sqlx::query("DELETE FROM invocations WHERE workspace_id = $1 AND invocation_id <= 2000")
        .bind(workspace)
        .execute(&pool)
        .await?;
    wait::until_ok("both messages to have fired", SOON, || async {
        let fired = texts(&pool, &key, "count").await?;
        anyhow::ensure!(fired == ["first", "second"], "{fired:?}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_fires_once_while_workers_and_gateways_die() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    fires_once(&stack).await.inspect_err(|_| println!("{}", stack.logs(40)))
}

async fn fires_once(stack: &Stack) -> Result<()> {
    let (first, other) = (stack.gateway(0), stack.gateway(1));
    let pool = PgPool::connect(stack.database_url()).await?;
    let key = Api::create_workspace(other.url(), "storm").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob));
    bob.post("/v1/actions", json!({ "name": "count", "description": "", "handler_agent": "bob" })).await?.success()?;
    for _ in 0..2 {
        key.post("/v1/triggers", json!({ "channel": "general", "action_name": "count" })).await?.success()?;
    }
    let mut accepted = Vec::new();
    for round in 0..4 {
        for n in 0..25 {
            let body = format!("{round}-{n}");
            let through = if n % 2 == 0 { ann.clone() } else { ann.at(first.url()) };
            // Posts may be shed while processes start on a loaded machine, so they are retried.
            wait::until_ok("a post to be accepted", SOON, || async {
                let (post, key) = (json!({ "text": body }), [("idempotency-key", &*body)]);
                through.call(Method::POST, "/v1/channels/general/messages", Some(post), &key).await?.success()
            })
            .await?;
            accepted.push(body);
        }
        // The worker is killed before it has recorded all of its invocations.
        stack.worker().kill9();
        if round == 1 {
            first.kill9();
            first.restart().await?;
        }
        stack.worker().restart().await?;
    }
    let mut expected: Vec<String> = accepted.iter().flat_map(|body| [body.clone(), body.clone()]).collect();
    expected.sort();
    wait::until_ok("every message to have fired", Duration::from_secs(60), || async {
        let fired = texts(&pool, &key, "count").await?;
        anyhow::ensure!(fired.len() >= expected.len(), "{} of {}", fired.len(), expected.len());
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    // Any other worker would have scanned the same events by now.
    let done: (i64, i64) = sqlx::query_as(
        "SELECT p.reached_seq, h.next_seq - 1 FROM trigger_progress p JOIN event_heads h USING (workspace_id)",
    )
    .fetch_one(&pool)
    .await?;
    println!("looked through {} of {} events", done.0, done.1);
    wait::until("the log to be looked through", SOON, || async {
        let left: Result<i64, _> = sqlx::query_scalar(
            "SELECT count(*) FROM trigger_progress p JOIN event_heads h USING (workspace_id)
              WHERE p.reached_seq < h.next_seq - 1",
        )
        .fetch_one(&pool)
        .await;
        left.is_ok_and(|left| left == 0)
    })
    .await;
    assert_eq!(texts(&pool, &key, "count").await?, expected, "once for each trigger and message");
    Ok(())
}
