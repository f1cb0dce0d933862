//! Authorisation: every route with every wrong token, and ids of another workspace everywhere.
//!
//! The routes are read from the gateway's source; a route missing in the table fails the test.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use relay_acceptance::access::{Class, ROUTES};
use relay_acceptance::raw::{Raw, is_failure};
use relay_acceptance::routes::{anonymize_path, gateway_routes};
use relay_testkit::client::{Agent, Api, NodeToken, Reply};
use relay_testkit::shared;
use serde_json::{Value, json};

/// Scopes of observer tokens.
const READS: [&str; 12] = [
    "stream",
    "messages",
    "threads",
    "dms",
    "channels",
    "search",
    "agents",
    "nodes",
    "deliveries",
    "activity",
    "files",
    "reactions",
];

/// Workspace with one object of each kind.
struct Tenant {
    key: Api,
    id: String,
    ann: Agent,
    bob: Agent,
    node: NodeToken,
    /// Observer token with `stream:read` only.
    observer: String,
    /// Observer token with every scope, and the token of a webhook.
    reader: String,
    hook: String,
    /// Returns the values of placeholders in paths and bodies.
    names: Vec<(&'static str, String)>,
}

impl Tenant {
    async fn new(base: &str, tag: &str) -> Result<Self> {
        let key = Api::create_workspace(base, tag).await?;
        let id = key.get("/v1/workspace").await?.data()["id"].as_str().unwrap_or_default().to_owned();
        let ann = key.register_agent(&format!("ann-{tag}")).await?;
        let bob = key.register_agent(&format!("bob-{tag}")).await?;
        let as_ann = key.as_agent(&ann);
        let channel = format!("room-{tag}");
        as_ann.create_channel(&channel).await?;
        key.as_agent(&bob).join(&channel).await?;
        let message = as_ann.post_message(&channel, "secret").await?.success()?;
        let node = key.create_broker_node(&format!("node_{tag}_{id}"), &format!("box-{tag}")).await?;
        let group = as_ann.post("/v1/dm/group", json!({ "participants": [bob.name], "name": "g" })).await?.success()?;
        let observer = json!({ "name": "stream", "scopes": ["stream:read"] });
        let observer = key.post("/v1/observer-tokens", observer).await?.success()?;
        let scopes: Vec<String> = READS.iter().map(|noun| format!("{noun}:read")).collect();
        let reader = json!({ "name": "reader", "scopes": scopes, "filters": { "include_dms": true } });
        let reader = key.post("/v1/observer-tokens", reader).await?.success()?;
        let declared = json!({ "filename": "f", "content_type": "text/plain", "size_bytes": 1 });
        let file = key.as_agent(&bob).post("/v1/files/upload", declared).await?.success()?;
        let webhook = key.post("/v1/webhooks", json!({ "channel": channel })).await?.success()?;
        let subscription = json!({ "events": ["*"], "url": "https://127.0.0.1:9/" });
        let subscription = key.post("/v1/subscriptions", subscription).await?.success()?;
        let action = json!({ "name": format!("do-{tag}"), "handler_agent": bob.name });
        let action = key.post("/v1/actions", action).await?.success()?;
        let trigger = json!({ "channel": channel, "action_name": "build", "enabled": false });
        let trigger = key.post("/v1/triggers", trigger).await?.success()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let invoke = format!("/v1/actions/{}/invoke", text(&action["name"]));
        let invocation = as_ann.post(&invoke, json!({})).await?.success()?;
        // An open invocation would change by itself, because its handler is not connected.
        let complete = format!(
            "/v1/actions/{}/invocations/{}/complete",
            text(&action["name"]),
            text(&invocation["invocation_id"])
        );
        key.as_agent(&bob).post(&complete, json!({ "output": "done" })).await?.success()?;
        let names = vec![
            ("{observer}", text(&observer["id"])),
            ("{message}", text(&message["id"])),
            ("{delivery}", format!("del_{}_{}", text(&message["id"]), bob.id)),
            ("{conversation}", text(&group["id"])),
            ("{session}", "s-1".to_owned()),
            ("{address}", format!("{}@direct", bob.name)),
            ("{channel}", channel),
            ("{agent}", bob.name.clone()),
            ("{node}", node.name.clone()),
            ("{provider}", "broker".to_owned()),
            ("{emoji}", "+1".to_owned()),
            ("{file}", text(&file["id"])),
            ("{webhook}", text(&webhook["id"])),
            ("{subscription}", text(&subscription["id"])),
            ("{action}", text(&action["name"])),
            ("{invocation}", text(&invocation["invocation_id"])),
            ("{trigger}", text(&trigger["id"])),
            ("{number}", "7".to_owned()),
            ("{id}", id.clone()),
            ("{name}", "nobody-has-this-name".to_owned()),
            ("{file}", "app.js".to_owned()),
        ];
        let (observer, reader, hook) = (text(&observer["token"]), text(&reader["token"]), text(&webhook["token"]));
        Ok(Self { key, id, ann, bob, node, observer, reader, hook, names })
    }

    fn fill(&self, template: &str) -> String {
        self.names.iter().fold(template.to_owned(), |text, (hole, name)| text.replace(hole, name))
    }

    /// Returns everything that another caller could have changed.
    async fn state(&self) -> Result<Value> {
        let (ann, bob) = (self.key.as_agent(&self.ann), self.key.as_agent(&self.bob));
        let mut seen = Vec::new();
        for path in [
            "/v1/workspace",
            "/v1/channels?include_archived=true",
            "/v1/nodes",
            "/v1/observer-tokens",
            "/v1/webhooks",
            "/v1/subscriptions",
            "/v1/actions",
            "/v1/triggers",
        ] {
            seen.push(self.key.get(path).await?.success()?);
        }
        for path in [
            "/v1/channels/{channel}",
            "/v1/channels/{channel}/messages",
            "/v1/messages/{message}/replies",
            "/v1/nodes/{node}/agents",
            "/v1/files/{file}",
            "/v1/agents/{agent}/events",
            "/v1/actions/{action}/invocations/{invocation}",
        ] {
            seen.push(self.key.get(&self.fill(path)).await?.success()?);
        }
        for api in [ann, bob] {
            seen.push(api.get("/v1/deliveries").await?.success()?);
            seen.push(api.get("/v1/dm/conversations").await?.success()?);
            seen.push(api.get(&self.fill("/v1/dm/{conversation}/messages")).await?.success()?);
        }
        for token in seen.iter_mut().flat_map(|list| list.as_array_mut()).flatten() {
            if let Some(last_used) = token.get_mut("last_used_at") {
                *last_used = Value::Null;
            }
        }
        let mut agents = self.key.get("/v1/agents").await?.success()?;
        for agent in agents.as_array_mut().into_iter().flatten() {
            // Excluded because the test's own requests change it.
            for moving in ["last_seen", "status", "activity_status"] {
                agent[moving] = Value::Null;
            }
        }
        seen.push(agents);
        Ok(Value::Array(seen))
    }
}

async fn call(base: &str, method: &str, path: &str, body: &str, token: &str) -> Result<Reply> {
    let mut request = Raw::new(method, format!("{base}{path}")).bearer(token);
    if !body.is_empty() {
        request = request.json(body);
    }
    if path == "/v1/node/ws" || path == "/v1/ws" {
        request = request.upgrade();
    }
    request.send().await
}

#[test]
fn the_table_has_every_route_of_the_gateway() -> Result<()> {
    let listed: BTreeSet<_> =
        ROUTES.iter().map(|(method, path, ..)| ((*method).to_owned(), anonymize_path(path))).collect();
    let routed = gateway_routes()?;
    ensure!(routed.len() > 40, "only {} routes were found in the source", routed.len());
    let missing: Vec<_> = routed.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&routed).collect();
    assert!(missing.is_empty() && stale.is_empty(), "not in the table: {missing:?}; not routed: {stale:?}");
    Ok(())
}

/// Returns the expected status and code of a route of this class for a valid or invalid token; `None` if access is
/// granted.
fn expected(class: Class, kind: &str, alive: bool) -> Option<(u16, &'static str)> {
    use Class as C;
    if class == C::Operator {
        return Some((401, "unauthorized"));
    }
    if class == C::None || (class == C::MaybeKey && kind == "none") {
        return None;
    }
    if class == C::Hook {
        // Valid tokens of other kinds: the table contains no webhook's own token.
        let code = if kind == "wh" { "webhook_token_invalid" } else { "webhook_token_required" };
        return Some((401, code));
    }
    let allowed: &[&str] = match class {
        C::None | C::Operator | C::Hook => &[],
        C::MaybeKey | C::Key => &["rk"],
        C::Agent => &["at"],
        C::Acting | C::Any => &["rk", "at"],
        C::Sender => &["rk", "at", "nt"],
        C::Observe | C::ReadAnything | C::Read => &["rk", "ot"],
        C::ReadOrAgent => &["rk", "at", "ot"],
        C::ReadOrAgentOrNode => &["rk", "at", "nt", "ot"],
        C::Socket => &["nt"],
    };
    if !allowed.contains(&kind) {
        return Some(match kind {
            "nt" if class != C::Socket => (401, "node_token_forbidden"),
            "ot" if class != C::Socket => (401, "observer_token_forbidden"),
            _ => (401, "unauthorized"),
        });
    }
    match (kind, alive) {
        ("rk", false) => Some((401, "unauthorized")),
        ("at", false) => Some((401, "agent_token_invalid")),
        ("ot", false) => Some((401, "observer_token_invalid")),
        (_, false) => Some((401, "node_token_invalid")),
        // Grants `stream:read` only.
        ("ot", true) if !matches!(class, C::Observe | C::ReadAnything) => Some((403, "insufficient_scope")),
        ("rk", true) if matches!(class, C::Acting | C::Sender) => Some((403, "agent_token_required")),
        (_, true) => None,
    }
}

#[tokio::test]
async fn every_route_refuses_every_wrong_token_with_the_documented_code() -> Result<()> {
    let base = shared().await.any_gateway();
    let tenant = Tenant::new(base, "auth").await?;
    let before = tenant.state().await?;
    let hex = "0".repeat(32);
    let dead = |prefix: &str| format!("{prefix}_live_{hex}");
    let tokens = [
        ("none", String::new(), false),
        ("junk", "nonsense".to_owned(), false),
        ("junk", "rk_test_00".to_owned(), false),
        ("junk", format!("at_live_{}", "0".repeat(1000)), false),
        ("rk", dead("rk"), false),
        ("at", dead("at"), false),
        ("nt", dead("nt"), false),
        ("ot", dead("ot"), false),
        ("ot", format!("ot_live_{}", "0".repeat(48)), false),
        ("wh", dead("wh"), false),
        ("rk", tenant.key.token().to_owned(), true),
        ("at", tenant.ann.token.clone(), true),
        ("nt", tenant.node.token.clone(), true),
        ("ot", tenant.observer.clone(), true),
    ];
    let mut checked = 0;
    for (method, path, class, body) in ROUTES {
        for (kind, token, alive) in &tokens {
            // Refusals only, because a granted request would change the state.
            let Some((status, code)) = expected(*class, kind, *alive) else { continue };
            let path = tenant.fill(path);
            // Authentication precedes validation: a malformed body makes no difference.
            for body in [tenant.fill(body).as_str(), "{broken"] {
                if *method == "GET" && body == "{broken" {
                    continue;
                }
                let reply = call(base, method, &path, body, token).await?;
                assert!(is_failure(&reply), "{method} {path} with {kind}: {} {}", reply.status, reply.body);
                assert_eq!((reply.status, reply.code()), (status, code), "{method} {path} with {kind} {token}");
                let message = reply.body["error"]["message"].as_str().unwrap_or_default();
                assert!(token.len() < 12 || !message.contains(token.as_str()), "no token is repeated");
                match code {
                    "agent_token_invalid" => assert_eq!(message, "Invalid agent token"),
                    "unauthorized" if *kind == "none" && *class != Class::Socket => {
                        assert_eq!(message, "Missing or invalid Authorization header");
                    }
                    "unauthorized" if *kind == "junk" && !matches!(class, Class::Socket | Class::Operator) => {
                        assert_eq!(message, "Invalid token format");
                    }
                    "unauthorized" if *kind == "rk" && allowed_key(*class) => assert_eq!(message, "Invalid API key"),
                    _ => {}
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 400, "only {checked} combinations");
    assert_eq!(tenant.state().await?, before, "a refused request changed something");
    Ok(())
}

const fn allowed_key(class: Class) -> bool {
    !matches!(class, Class::Agent | Class::Socket | Class::Operator)
}

#[tokio::test]
async fn only_the_bearer_scheme_is_accepted_in_any_case() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "bearer").await?;
    let url = format!("{base}/v1/workspace");
    for scheme in ["Bearer", "bearer", "BEARER"] {
        let reply = Raw::new("GET", &url).header("authorization", format!("{scheme} {}", key.token())).send().await?;
        assert_eq!(reply.status, 200, "{scheme}");
    }
    let token = key.token();
    for value in [
        format!("Basic {token}"),
        token.to_owned(),
        format!("Bearer{token}"),
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        format!("Token {token}"),
        String::new(),
    ] {
        let reply = Raw::new("GET", &url).header("authorization", &value).send().await?;
        reply.refused(401, "unauthorized")?;
    }
    Raw::new("GET", &url).header("authorization", b"Bearer \xff\xfe").send().await?.refused(401, "unauthorized")?;
    // REST does not accept tokens in the query.
    Raw::new("GET", format!("{url}?token={token}")).send().await?.refused(401, "unauthorized")?;
    Ok(())
}

/// Status, code and text are the same for an id of another workspace and for a missing one.
#[tokio::test]
async fn resources_of_another_workspace_look_like_missing_ones() -> Result<()> {
    let base = shared().await.any_gateway();
    let victim = Tenant::new(base, "victim").await?;
    let intruder = Tenant::new(base, "intruder").await?;
    let before = victim.state().await?;
    // For each kind of name: the caller's own one, and a missing one.
    let absent: Vec<(&str, String)> = vec![
        ("{message}", "1".to_owned()),
        ("{delivery}", format!("del_1_{}", intruder.bob.id)),
        ("{conversation}", "dm_000000000000000000000000".to_owned()),
        ("{session}", "no-such-session".to_owned()),
        ("{address}", "no-such-agent@direct".to_owned()),
        ("{channel}", "no-such-room".to_owned()),
        ("{agent}", "no-such-agent".to_owned()),
        ("{node}", "no-such-node".to_owned()),
        ("{observer}", "ot_1".to_owned()),
        ("{provider}", "broker".to_owned()),
        ("{action}", "no-such-action".to_owned()),
        ("{invocation}", "inv_1".to_owned()),
        ("{file}", "file_1".to_owned()),
        ("{webhook}", "wh_1".to_owned()),
        ("{subscription}", "sub_1".to_owned()),
        ("{trigger}", "trg_1".to_owned()),
        ("{id}", "1".to_owned()),
    ];
    let mut checked = 0;
    for (_, path, _, _) in ROUTES {
        let holes = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(hole, _)| hole);
        for hole in holes {
            let is_tried = absent.iter().any(|(known, _)| known.trim_matches(['{', '}']) == hole);
            // Names nested in other placeholders, and names outside of workspaces.
            let is_nobodys = ["provider", "emoji", "number", "kid", "name"].contains(&hole);
            assert!(is_tried || is_nobodys, "{path}: say what {{{hole}}} looks like when nobody has it");
        }
    }
    for (method, path, class, body) in ROUTES {
        for (hole, nobodys) in &absent {
            if !path.contains(hole) && !body.contains(hole) || *hole == "{provider}" {
                continue;
            }
            // Routes without a workspace token, and routes that are not plain requests.
            if matches!(class, Class::None | Class::MaybeKey | Class::Socket) {
                continue;
            }
            let victims = victim.names.iter().find(|(name, _)| name == hole).map(|(_, value)| value.as_str());
            let victims = victims.unwrap_or_default();
            // All other placeholders belong to the caller, so that this one decides.
            let fill = |template: &str, value: &str| intruder.fill(&template.replace(hole, value));
            let tokens = [
                ("key", intruder.key.token()),
                ("agent", &*intruder.ann.token),
                ("node", &*intruder.node.token),
                ("observer", &*intruder.reader),
                ("webhook", &*intruder.hook),
            ];
            for (who, token) in tokens {
                let body_of = |value: &str| {
                    let body = fill(body, value);
                    if who == "node" && *class == Class::Sender {
                        body.replace('{', &format!(r#"{{"from":"{}","#, intruder.ann.name))
                    } else {
                        body
                    }
                };
                let theirs = call(base, method, &fill(path, victims), &body_of(victims), token).await?;
                let nobody = call(base, method, &fill(path, nobodys), &body_of(nobodys), token).await?;
                let what = format!("{method} {path} ({hole}) as {who}");
                let plain = |reply: &Reply, name: &str| reply.body.to_string().replace(name, "<it>");
                // A session is a handle of clients; one without messages in the caller's workspace is no error.
                if *hole == "{session}" && who == "key" {
                    assert_eq!((&theirs.body["data"], &nobody.body["data"]), (&json!([]), &json!([])), "{what}");
                    checked += 1;
                    continue;
                }
                assert!((400..500).contains(&theirs.status), "{what}: {} {}", theirs.status, theirs.body);
                assert_eq!(theirs.status, nobody.status, "{what}: {} and {}", theirs.body, nobody.body);
                assert_eq!(plain(&theirs, victims), plain(&nobody, nobodys), "{what}");
                assert!(is_failure(&theirs), "{what}: {}", theirs.body);
                checked += 1;
            }
        }
    }
    assert!(checked > 400, "only {checked} combinations");
    assert_eq!(victim.state().await?, before, "another tenant changed something");
    // A node enrolled under an id or name of another workspace belongs to the caller and leaves the other one
    // unchanged.
    let body = json!({ "node_id": victim.node.node_id, "name": victim.node.name, "kind": "ws", "role": "broker" });
    let taken = intruder.key.post("/v1/nodes", body).await?;
    assert!(taken.status < 500, "{}", taken.body);
    assert_eq!(victim.state().await?, before, "enrolling a node of the same id changed another tenant's");
    let ws = Raw::new("GET", format!("{base}/v1/node/ws")).upgrade().bearer(&victim.node.token).send().await?;
    assert_eq!(ws.status, 101, "the victim's node token still works");
    // A workspace id in the path has no effect beyond the key's workspace.
    let other = call(base, "DELETE", &format!("/v1/workspaces/{}", victim.id), "", intruder.key.token()).await?;
    other.refused(404, "workspace_not_found")?;
    Ok(())
}

/// Within a workspace, deliveries belong to their recipient.
#[tokio::test]
async fn another_agents_deliveries_look_like_missing_ones() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "neighbours").await?;
    let (ann, bob, eve) =
        (key.register_agent("ann").await?, key.register_agent("bob").await?, key.register_agent("eve").await?);
    let dm = key.as_agent(&ann).dm("bob", "between us").await?.success()?;
    let (message, conversation) =
        (dm["id"].as_str().unwrap_or_default(), dm["conversation_id"].as_str().unwrap_or_default());
    let delivery = format!("del_{message}_{}", bob.id);
    let as_eve = key.as_agent(&eve);
    for path in [format!("/v1/messages/{message}"), format!("/v1/messages/{message}/replies")] {
        as_eve.get(&path).await?.refused(404, "message_not_found")?;
    }
    as_eve
        .post(&format!("/v1/messages/{message}/replies"), json!({ "text": "x" }))
        .await?
        .refused(404, "message_not_found")?;
    as_eve.post_empty(&format!("/v1/messages/{message}/read")).await?.refused(404, "message_not_found")?;
    for (verb, body) in
        [("ack", json!({})), ("fail", json!({})), ("defer", json!({ "available_at": "2030-01-01T00:00:00Z" }))]
    {
        as_eve
            .post(&format!("/v1/deliveries/{delivery}/{verb}"), body.clone())
            .await?
            .refused(404, "delivery_not_found")?;
        key.as_agent(&ann)
            .post(&format!("/v1/deliveries/{delivery}/{verb}"), body)
            .await?
            .refused(404, "delivery_not_found")?;
    }
    as_eve.get(&format!("/v1/dm/{conversation}/messages")).await?.refused(403, "forbidden")?;
    as_eve.post(&format!("/v1/dm/{conversation}/messages"), json!({ "text": "x" })).await?.refused(403, "forbidden")?;
    as_eve
        .post(&format!("/v1/dm/{conversation}/participants"), json!({ "agent_name": "eve" }))
        .await?
        .refused(403, "forbidden")?;
    as_eve.post("/v1/agents/bob/rotate-token", json!({})).await?.refused(403, "agent_recovery_not_authorized")?;
    assert_eq!(as_eve.get("/v1/dm/conversations").await?.success()?, json!([]));
    let bobs = key.as_agent(&bob).get("/v1/deliveries").await?.success()?;
    assert_eq!((bobs[0]["id"].as_str(), bobs[0]["status"].as_str()), (Some(&*delivery), Some("queued")));
    Ok(())
}
