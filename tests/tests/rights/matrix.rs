//! Every route with every right, closed and open, by policy and by override.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use relay_acceptance::{
    access::{Class, DEFAULT_RIGHTS, FURTHER_RIGHTS, RESTRICTIONS, ROUTES, Restriction, settings_of_rights},
    raw::Raw,
    room::{rows, text},
};
use relay_testkit::{
    client::{Agent, Api, Reply},
    shared,
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

use super::filters::SCOPES;

/// Routes that are checked beside each other, each in a world of its own.
const AT_A_TIME: usize = 4;

/// Workspace in which `ann` owns one object of each kind, and `bob` another one.
struct World {
    key: Api,
    ann: Agent,
    /// Values of placeholders: of ann's objects and of bob's.
    own: BTreeMap<&'static str, String>,
    others: BTreeMap<&'static str, String>,
    /// Values of ann's objects, with an action that it handles.
    handled: BTreeMap<&'static str, String>,
}

/// Creates what an agent can own; `child` is an agent that it spawned.
async fn owned_by(api: &Api, child: &Agent, action: &str) -> Result<BTreeMap<&'static str, String>> {
    let message = api.post_message("room", "hello").await?.success()?;
    let group = api.post("/v1/dm/group", json!({ "participants": ["ann", "bob"] })).await?.success()?;
    let subscription = json!({ "events": ["node.binding.disabled"], "url": "https://127.0.0.1:9/" });
    let subscription = api.post("/v1/subscriptions", subscription).await?.success()?;
    let trigger = json!({ "action_name": action, "enabled": false });
    let trigger = api.post("/v1/triggers", trigger).await?.success()?;
    let invocation = api.post(&format!("/v1/actions/{action}/invoke"), json!({})).await?.success()?;
    let id = |value: &Value| text(&value["id"]).to_owned();
    Ok(BTreeMap::from([
        ("{agent}", child.name.clone()),
        ("{agent_id}", child.id.clone()),
        ("{message}", id(&message)),
        ("{conversation}", id(&group)),
        ("{subscription}", id(&subscription)),
        ("{trigger}", id(&trigger)),
        ("{invocation}", text(&invocation["invocation_id"]).to_owned()),
        ("{action}", action.to_owned()),
        ("{channel}", "room".to_owned()),
        ("{session}", "s-1".to_owned()),
        ("{address}", "bob@direct".to_owned()),
        ("{number}", "7".to_owned()),
    ]))
}

impl World {
    async fn new() -> Result<Self> {
        let engine = shared().await;
        let key = Api::create_workspace(&engine.gateways[0], "rights-matrix").await?;
        let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let (child, stranger) = (key.register_agent("child").await?, key.register_agent("stranger").await?);
        let (as_ann, as_bob) = (key.as_agent(&ann), key.as_agent(&bob));
        as_ann.create_channel("room").await?;
        as_bob.join("room").await?;
        // Handled by neither, so that the handler of an invocation is another agent.
        let action = json!({ "name": "build", "handler_agent": "stranger" });
        key.post("/v1/actions", action).await?.success()?;
        // The way of a spawn is in `rules`.
        let mut database = PgConnection::connect(&engine.database_url).await?;
        sqlx::query("UPDATE agents SET spawned_by = $1 WHERE agent_id = $2")
            .bind(ann.id.parse::<i64>()?)
            .bind(child.id.parse::<i64>()?)
            .execute(&mut database)
            .await?;
        let own = owned_by(&as_ann, &child, "build");
        let (own, others) = tokio::try_join!(own, owned_by(&as_bob, &stranger, "build"))?;
        as_ann.post("/v1/actions", json!({ "name": "review", "handler_agent": "ann" })).await?.success()?;
        let review = as_bob.post("/v1/actions/review/invoke", json!({})).await?.success()?;
        let mut handled = own.clone();
        handled.insert("{action}", "review".to_owned());
        handled.insert("{invocation}", text(&review["invocation_id"]).to_owned());
        Ok(Self { key, ann, own, others, handled })
    }

    fn fill(template: &str, names: &BTreeMap<&'static str, String>) -> String {
        names.iter().fold(template.to_owned(), |text, (hole, name)| text.replace(hole, name))
    }

    /// Tokens that are no agent's: of a broker, of ann's own node, and of an observer with every scope.
    async fn other_tokens(&self) -> Result<Vec<(&'static str, String)>> {
        let broker = self.key.create_broker_node("node_box", "box").await?;
        let own = self.key.as_agent(&self.ann).direct_node_token().await?;
        let observer = json!({ "name": "all", "scopes": SCOPES, "filters": { "include_dms": true } });
        let observer = self.key.post("/v1/observer-tokens", observer).await?.success()?;
        let observer = text(&observer["token"]).to_owned();
        Ok(vec![("a broker", broker.token), ("ann's node", own.token), ("an observer", observer)])
    }

    /// Sends a request of the table with a token.
    async fn call(
        &self,
        restriction: &Restriction,
        token: &str,
        names: &BTreeMap<&'static str, String>,
    ) -> Result<Reply> {
        let (_, body) = class_and_body(restriction.method, restriction.path)?;
        let path = Self::fill(restriction.path, names);
        send(self.key.base(), restriction.method, &path, &Self::fill(&body, names), token).await
    }

    async fn set_override(&self, rights: Value) -> Result<()> {
        self.key.patch("/v1/agents/ann", json!({ "rights": rights })).await?.success().map(drop)
    }

    async fn set_policy(&self, policy: Value) -> Result<()> {
        self.key.patch("/v1/workspace", json!({ "policy": policy })).await?.success().map(drop)
    }

    /// Checks that refusals with this code were recorded once.
    async fn expect_one_event(&self, code: &str, right: &str) -> Result<()> {
        let log = self.key.get("/v1/workspace/events?limit=500").await?.success()?;
        let denied: Vec<&Value> =
            rows(&log["events"]).iter().filter(|event| event["type"] == "access.denied").collect();
        let of_code: Vec<&&Value> = denied.iter().filter(|event| event["payload"]["code"] == code).collect();
        assert_eq!(of_code.len(), 1, "{code}: {denied:?}");
        let payload = &of_code[0]["payload"];
        assert_eq!((text(&payload["agent_name"]), text(&payload["right"])), ("ann", right), "{payload}");
        Ok(())
    }
}

/// Returns the class of a route, and its body with what makes it valid for the caller.
fn class_and_body(method: &str, path: &str) -> Result<(Class, String)> {
    let (_, _, class, body) =
        ROUTES.iter().find(|(m, p, ..)| (*m, *p) == (method, path)).with_context(|| format!("{method} {path}"))?;
    let body = match path {
        "/v1/agents/release-exact" => body.replace(r#""7""#, r#""{agent_id}""#),
        "/v1/actions" => body.replace("{agent}", "ann"),
        _ => (*body).to_owned(),
    };
    Ok((*class, body))
}

async fn send(base: &str, method: &str, path: &str, body: &str, token: &str) -> Result<Reply> {
    let request = Raw::new(method, format!("{base}{path}"))
        .bearer(token)
        .header("idempotency-key", uuid::Uuid::new_v4().to_string());
    let request = if body.is_empty() { request } else { request.json(body) };
    request.send().await
}

fn codes() -> BTreeSet<&'static str> {
    let of = |restriction: &Restriction| [restriction.closed_by, restriction.opened_by];
    RESTRICTIONS.iter().flat_map(of).flatten().map(|(_, code)| code).collect()
}

fn is_refused(reply: &Reply) -> bool {
    reply.status == 403 && codes().contains(reply.code())
}

/// Checks restrictions, some at a time.
async fn check_each<F: Future<Output = Result<()>>>(check: impl FnMut(&'static Restriction) -> F) -> Result<()> {
    stream::iter(RESTRICTIONS).map(check).buffer_unordered(AT_A_TIME).try_collect().await
}

/// Each step leaves the objects as they are, until the last one.
#[tokio::test]
async fn a_default_right_closes_its_route_by_override_and_by_policy() -> Result<()> {
    check_each(|restriction| async move {
        let Some((right, code)) = restriction.closed_by else { return Ok(()) };
        let world = World::new().await?;
        let what = format!("{} {} without {right}", restriction.method, restriction.path);
        let token = world.ann.token.as_str();
        world.set_override(json!({ right: false })).await?;
        let refused = world.call(restriction, token, &world.own).await?;
        assert_eq!((refused.status, refused.code()), (403, code), "{what}, by override: {}", refused.body);
        world.set_override(Value::Null).await?;
        world.set_policy(json!({ right: false })).await?;
        let refused = world.call(restriction, token, &world.own).await?;
        assert_eq!((refused.status, refused.code()), (403, code), "{what}, by policy: {}", refused.body);
        world.expect_one_event(code, right_of(code, right)).await?;
        world.set_override(json!({ right: true })).await?;
        let permitted = world.call(restriction, token, &world.own).await?;
        assert!(!is_refused(&permitted), "{what}, opened by override: {}", permitted.body);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_further_right_opens_what_belongs_to_others() -> Result<()> {
    check_each(|restriction| async move {
        let Some((right, code)) = restriction.opened_by else { return Ok(()) };
        let world = World::new().await?;
        let what = format!("{} {} of another", restriction.method, restriction.path);
        let token = world.ann.token.as_str();
        let refused = world.call(restriction, token, &world.others).await?;
        assert_eq!((refused.status, refused.code()), (403, code), "{what}, by default: {}", refused.body);
        world.set_policy(json!({ right: true })).await?;
        world.set_override(json!({ right: false })).await?;
        let refused = world.call(restriction, token, &world.others).await?;
        assert_eq!((refused.status, refused.code()), (403, code), "{what}, closed by override: {}", refused.body);
        world.expect_one_event(code, right).await?;
        world.set_override(json!({ right: null })).await?;
        let permitted = world.call(restriction, token, &world.others).await?;
        assert!(permitted.status < 500 && permitted.status != 403, "{what}, opened: {}", permitted.body);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn no_right_opens_what_is_for_the_handler_of_an_action() -> Result<()> {
    check_each(|restriction| async move {
        let Some(code) = restriction.handler_only else { return Ok(()) };
        let world = World::new().await?;
        let what = format!("{} {} of another", restriction.method, restriction.path);
        for granted in [&DEFAULT_RIGHTS[..], &[&DEFAULT_RIGHTS[..], &FURTHER_RIGHTS].concat()] {
            world.set_policy(settings_of_rights(granted)).await?;
            let refused = world.call(restriction, &world.ann.token, &world.others).await?;
            assert_eq!((refused.status, refused.code()), (403, code), "{what} with {granted:?}: {}", refused.body);
        }
        world.expect_one_event(code, "").await
    })
    .await
}

/// Tokens that are no agent's have no rights that a setting could open or close. Refusals change nothing, so that all
/// share a world.
#[tokio::test]
async fn no_right_opens_a_route_of_agents_to_nodes_and_observers() -> Result<()> {
    let world = World::new().await?;
    let tokens = world.other_tokens().await?;
    for granted in [&[][..], &[&DEFAULT_RIGHTS[..], &FURTHER_RIGHTS].concat()] {
        world.set_policy(settings_of_rights(granted)).await?;
        for restriction in RESTRICTIONS {
            let (class, _) = class_and_body(restriction.method, restriction.path)?;
            for (who, token) in &tokens {
                let code = if *who == "an observer" { "observer_token_forbidden" } else { "node_token_forbidden" };
                // The rights of the author count: `nodes` has these.
                if class == Class::Sender && code == "node_token_forbidden" {
                    continue;
                }
                let what = format!("{} {} by {who} with {granted:?}", restriction.method, restriction.path);
                let refused = world.call(restriction, token, &world.own).await?;
                assert_eq!((refused.status, refused.code()), (401, code), "{what}: {}", refused.body);
            }
        }
    }
    Ok(())
}

/// An owner needs no further right, a handler no right, and the workspace key none at all.
#[tokio::test]
async fn owners_and_the_key_are_never_refused() -> Result<()> {
    check_each(|restriction| async move {
        let world = World::new().await?;
        let is_for_handlers = restriction.handler_only.is_some();
        let own = if is_for_handlers { &world.handled } else { &world.own };
        for (who, token, names) in
            [("ann", world.ann.token.as_str(), own), ("the key", world.key.token(), &world.others)]
        {
            if who == "the key" || is_for_handlers {
                world.set_policy(settings_of_rights(&[])).await?;
            }
            let reply = world.call(restriction, token, names).await?;
            let what = format!("{} {} by {who}: {} {}", restriction.method, restriction.path, reply.status, reply.body);
            assert!(!is_refused(&reply) && reply.status < 500 || reply.status == 503, "{what}");
            assert!(!is_for_handlers || reply.is_success(), "{what}");
        }
        Ok(())
    })
    .await
}

/// No route outside of the table depends on rights, with any token that it accepts. Reads change nothing, so they share
/// a world.
#[tokio::test]
async fn no_other_route_depends_on_rights() -> Result<()> {
    let restricted: BTreeSet<_> =
        RESTRICTIONS.iter().map(|restriction| (restriction.method, restriction.path)).collect();
    let takes_agents = |class: &Class| {
        matches!(
            class,
            Class::Agent | Class::Acting | Class::Any | Class::ReadOrAgent | Class::ReadOrAgentOrNode | Class::Sender
        )
    };
    let (reads, changes): (Vec<_>, Vec<_>) = ROUTES
        .iter()
        .filter(|(method, path, class, _)| takes_agents(class) && !restricted.contains(&(*method, *path)))
        .map(|(method, path, _, body)| (*method, *path, *body))
        .partition(|(method, ..)| *method == "GET");
    assert!(reads.len() + changes.len() > 40, "only {} routes", reads.len() + changes.len());
    let checks = changes.into_iter().map(|(method, path, body)| async move {
        let world = World::new().await?;
        world.set_override(settings_of_rights(&[])).await?;
        let (path, body) = (World::fill(path, &world.own), World::fill(body, &world.own));
        let reply = send(world.key.base(), method, &path, &body, &world.ann.token).await?;
        assert!(!is_refused(&reply), "{method} {path}: {} {}", reply.status, reply.body);
        anyhow::Ok(())
    });
    let changes = stream::iter(checks).buffer_unordered(AT_A_TIME).try_collect::<()>();
    tokio::try_join!(changes, check_reads(&reads)).map(drop)
}

/// Checks that reads have the same outcome with every token, whatever the rights of agents are.
async fn check_reads(reads: &[(&str, &str, &str)]) -> Result<()> {
    let world = World::new().await?;
    let mut tokens = world.other_tokens().await?;
    tokens.extend([("ann", world.ann.token.clone()), ("the key", world.key.token().to_owned())]);
    let outcomes = async || {
        let mut outcomes = Vec::new();
        for (method, path, body) in reads {
            for (who, token) in &tokens {
                let path = World::fill(path, &world.own);
                let reply = send(world.key.base(), method, &path, body, token).await?;
                outcomes.push((format!("{method} {path} by {who}"), reply.status, reply.code().to_owned()));
            }
        }
        anyhow::Ok(outcomes)
    };
    let by_default = outcomes().await?;
    world.set_policy(settings_of_rights(&FURTHER_RIGHTS)).await?;
    assert_eq!(outcomes().await?, by_default, "with every right reversed");
    Ok(())
}

/// A deletion without the right to release is refused as any other agent's is.
fn right_of<'a>(code: &str, right: &'a str) -> &'a str {
    if code == "agent_not_spawned_by_caller" { "release_any" } else { right }
}
