//! Who may call what: every route with every wrong token, and another tenant's ids everywhere.
//!
//! The routes come from the gateway's source: one that this table does not know fails the test.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};
use relay_acceptance::raw::{Raw, is_failure};
use relay_testkit::client::{Agent, Api, NodeToken, Reply};
use relay_testkit::shared;
use serde_json::{Value, json};

/// Who may call a route (contract: rest.md 2.2).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Class {
    /// Anybody.
    None,
    /// Anybody, but a token that is there must be a workspace key.
    MaybeKey,
    /// A workspace key.
    Key,
    /// An agent token.
    Agent,
    /// An agent token; a workspace key is understood, and refused with 403.
    Acting,
    /// A workspace key or an agent token.
    Any,
    /// The same, or a node token.
    AnyOrNode,
    /// An agent or node token; a workspace key is understood, and refused with 403.
    Sender,
    /// A node token, at the upgrade.
    Socket,
}

/// Method, path, class, and the smallest body that is not refused for its shape.
const ROUTES: &[(&str, &str, Class, &str)] = &[
    ("GET", "/health", Class::None, ""),
    ("GET", "/ready", Class::None, ""),
    ("POST", "/v1/workspaces", Class::MaybeKey, r#"{"name":"w"}"#),
    ("GET", "/v1/workspaces/by-name/{name}", Class::None, ""),
    ("DELETE", "/v1/workspaces/{id}", Class::Key, ""),
    ("GET", "/v1/workspace", Class::Key, ""),
    ("PATCH", "/v1/workspace", Class::Key, r#"{"metadata":{"touched":true}}"#),
    ("DELETE", "/v1/workspace", Class::Key, ""),
    ("POST", "/v1/agents", Class::Key, r#"{"name":"intruder"}"#),
    ("GET", "/v1/agents", Class::Any, ""),
    ("GET", "/v1/agents/presence", Class::Any, ""),
    ("POST", "/v1/agents/heartbeat", Class::Agent, "{}"),
    ("POST", "/v1/agents/disconnect", Class::Agent, "{}"),
    ("GET", "/v1/agents/{agent}", Class::Any, ""),
    ("PATCH", "/v1/agents/{agent}", Class::Key, r#"{"persona":"touched"}"#),
    ("DELETE", "/v1/agents/{agent}", Class::Key, ""),
    ("POST", "/v1/agents/{agent}/rotate-token", Class::Any, "{}"),
    ("GET", "/v1/agent", Class::Agent, ""),
    ("POST", "/v1/agent/node-token", Class::Agent, "{}"),
    ("POST", "/v1/channels", Class::Any, r#"{"name":"intruders"}"#),
    ("GET", "/v1/channels", Class::AnyOrNode, ""),
    ("GET", "/v1/channels/{channel}", Class::AnyOrNode, ""),
    ("PATCH", "/v1/channels/{channel}", Class::Any, r#"{"topic":"touched"}"#),
    ("DELETE", "/v1/channels/{channel}", Class::Any, ""),
    ("PATCH", "/v1/channels/{channel}/topic", Class::Any, r#"{"topic":"touched"}"#),
    ("POST", "/v1/channels/{channel}/join", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/leave", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/invite", Class::Acting, r#"{"agent_name":"{agent}"}"#),
    ("GET", "/v1/channels/{channel}/members", Class::Any, ""),
    ("POST", "/v1/channels/{channel}/mute", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/unmute", Class::Agent, ""),
    ("GET", "/v1/channels/{channel}/messages", Class::Any, ""),
    ("POST", "/v1/channels/{channel}/messages", Class::Sender, r#"{"text":"touched"}"#),
    ("POST", "/v1/nodes", Class::Key, r#"{"name":"intruder"}"#),
    ("GET", "/v1/nodes", Class::Any, ""),
    ("GET", "/v1/nodes/{node}", Class::Any, ""),
    ("GET", "/v1/nodes/{node}/agents", Class::Any, ""),
    ("POST", "/v1/nodes/{node}/agents", Class::Key, r#"{"agent_name":"{agent}"}"#),
    ("DELETE", "/v1/nodes/{node}/agents/{agent}", Class::Key, ""),
    ("DELETE", "/v1/nodes/{node}/providers/{provider}", Class::Key, ""),
    ("GET", "/v1/deliveries", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/ack", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/fail", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/defer", Class::Agent, r#"{"available_at":"2030-01-01T00:00:00Z"}"#),
    ("GET", "/v1/messages/{message}", Class::Any, ""),
    ("GET", "/v1/messages/{message}/replies", Class::Any, ""),
    ("POST", "/v1/messages/{message}/replies", Class::Acting, r#"{"text":"touched"}"#),
    ("POST", "/v1/messages/{message}/read", Class::Agent, ""),
    ("POST", "/v1/dm", Class::Acting, r#"{"to":"{agent}","text":"touched"}"#),
    ("GET", "/v1/dm/conversations", Class::Agent, ""),
    ("POST", "/v1/dm/group", Class::Acting, r#"{"participants":["{agent}"]}"#),
    ("GET", "/v1/dm/{conversation}/messages", Class::Agent, ""),
    ("POST", "/v1/dm/{conversation}/messages", Class::Acting, r#"{"text":"touched"}"#),
    ("POST", "/v1/dm/{conversation}/participants", Class::Acting, r#"{"agent_name":"{agent}"}"#),
    ("DELETE", "/v1/dm/{conversation}/participants/{agent}", Class::Acting, ""),
    ("GET", "/v1/node/ws", Class::Socket, ""),
];

/// A workspace with one of everything.
struct Tenant {
    key: Api,
    id: String,
    ann: Agent,
    bob: Agent,
    node: NodeToken,
    /// What the placeholders of paths and bodies mean.
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
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let names = vec![
            ("{message}", text(&message["id"])),
            ("{delivery}", format!("del_{}_{}", text(&message["id"]), bob.id)),
            ("{conversation}", text(&group["id"])),
            ("{channel}", channel),
            ("{agent}", bob.name.clone()),
            ("{node}", node.name.clone()),
            ("{provider}", "broker".to_owned()),
            ("{id}", id.clone()),
            ("{name}", "nobody-has-this-name".to_owned()),
        ];
        Ok(Self { key, id, ann, bob, node, names })
    }

    fn fill(&self, template: &str) -> String {
        self.names.iter().fold(template.to_owned(), |text, (hole, name)| text.replace(hole, name))
    }

    /// Everything that somebody else could have touched.
    async fn state(&self) -> Result<Value> {
        let (ann, bob) = (self.key.as_agent(&self.ann), self.key.as_agent(&self.bob));
        let mut seen = Vec::new();
        for path in ["/v1/workspace", "/v1/channels?include_archived=true", "/v1/nodes"] {
            seen.push(self.key.get(path).await?.success()?);
        }
        for path in [
            "/v1/channels/{channel}",
            "/v1/channels/{channel}/messages",
            "/v1/messages/{message}/replies",
            "/v1/nodes/{node}/agents",
        ] {
            seen.push(self.key.get(&self.fill(path)).await?.success()?);
        }
        for api in [ann, bob] {
            seen.push(api.get("/v1/deliveries").await?.success()?);
            seen.push(api.get("/v1/dm/conversations").await?.success()?);
            seen.push(api.get(&self.fill("/v1/dm/{conversation}/messages")).await?.success()?);
        }
        let mut agents = self.key.get("/v1/agents").await?.success()?;
        for agent in agents.as_array_mut().into_iter().flatten() {
            // Our own looking moves this one.
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
    if path == "/v1/node/ws" {
        request = request.upgrade();
    }
    request.send().await
}

/// Every `.route(…)` of the gateway as (method, path with its parameters anonymous).
fn routes_of_the_gateway() -> Result<BTreeSet<(String, String)>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../services/gateway/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path)?;
                for part in source.split(".route(").skip(1) {
                    let Some((_, rest)) = part.split_once('"') else { continue };
                    let Some((route, rest)) = rest.split_once('"') else { continue };
                    let handlers = argument(rest);
                    for method in ["get", "post", "put", "patch", "delete", "any"] {
                        // The fallback answers where a path must not seem to exist with this method.
                        for handler in handlers.split(&format!("{method}(")).skip(1) {
                            if !handler.starts_with("middleware::fallback") {
                                found.insert((method.to_uppercase(), anonymous(route)));
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(found)
}

/// The source up to where the parenthesis of `.route(` closes.
fn argument(source: &str) -> &str {
    let mut depth = 1;
    for (at, byte) in source.bytes().enumerate() {
        depth += i32::from(byte == b'(') - i32::from(byte == b')');
        if depth == 0 {
            return &source[..at];
        }
    }
    source
}

fn anonymous(path: &str) -> String {
    let segment = |part: &str| if part.starts_with('{') { "{}".to_owned() } else { part.to_owned() };
    path.split('/').map(segment).collect::<Vec<_>>().join("/")
}

#[test]
fn the_table_has_every_route_of_the_gateway() -> Result<()> {
    let listed: BTreeSet<_> = ROUTES.iter().map(|(method, path, ..)| ((*method).to_owned(), anonymous(path))).collect();
    let routed = routes_of_the_gateway()?;
    ensure!(routed.len() > 40, "only {} routes were found in the source", routed.len());
    let missing: Vec<_> = routed.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&routed).collect();
    assert!(missing.is_empty() && stale.is_empty(), "not in the table: {missing:?}; not routed: {stale:?}");
    Ok(())
}

/// What a route of this class answers to a token that is alive or not: status and code, or `None` if it is
/// let in.
fn expected(class: Class, kind: &str, alive: bool) -> Option<(u16, &'static str)> {
    use Class as C;
    if class == C::None || (class == C::MaybeKey && kind == "none") {
        return None;
    }
    let allowed: &[&str] = match class {
        C::None => &[],
        C::MaybeKey | C::Key => &["rk"],
        C::Agent => &["at"],
        C::Acting | C::Any => &["rk", "at"],
        C::AnyOrNode | C::Sender => &["rk", "at", "nt"],
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
        (_, false) => Some((401, "node_token_invalid")),
        ("rk", true) if matches!(class, C::Acting | C::Sender) => Some((403, "agent_token_required")),
        (_, true) => None,
    }
}

#[tokio::test]
async fn every_route_refuses_every_wrong_token_by_the_contracts_code() -> Result<()> {
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
        ("wh", dead("wh"), false),
        ("rk", tenant.key.token().to_owned(), true),
        ("at", tenant.ann.token.clone(), true),
        ("nt", tenant.node.token.clone(), true),
    ];
    let mut checked = 0;
    for (method, path, class, body) in ROUTES {
        for (kind, token, alive) in &tokens {
            // Only refusals: what is let in would change something.
            let Some((status, code)) = expected(*class, kind, *alive) else { continue };
            let path = tenant.fill(path);
            // Who calls is looked at before what is asked for: a body that is broken makes no difference.
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
                    "unauthorized" if *kind == "junk" && *class != Class::Socket => {
                        assert_eq!(message, "Invalid token format");
                    }
                    "unauthorized" if *kind == "rk" && allowed_key(*class) => assert_eq!(message, "Invalid API key"),
                    _ => {}
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 500, "only {checked} combinations");
    assert_eq!(tenant.state().await?, before, "a refused request changed something");
    Ok(())
}

const fn allowed_key(class: Class) -> bool {
    !matches!(class, Class::Agent | Class::Socket)
}

#[tokio::test]
async fn a_bearer_is_read_in_any_case_and_nothing_else_is() -> Result<()> {
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
    // REST takes no token from the query.
    Raw::new("GET", format!("{url}?token={token}")).send().await?.refused(401, "unauthorized")?;
    Ok(())
}

/// Statuses, codes and texts are the same for an id of another tenant as for one that nobody has.
#[tokio::test]
async fn what_another_tenant_owns_is_as_absent_as_what_nobody_has() -> Result<()> {
    let base = shared().await.any_gateway();
    let victim = Tenant::new(base, "victim").await?;
    let intruder = Tenant::new(base, "intruder").await?;
    let before = victim.state().await?;
    // For each kind of name: the intruder's own, and how one that nobody has looks like.
    let absent: Vec<(&str, String)> = vec![
        ("{message}", "1".to_owned()),
        ("{delivery}", format!("del_1_{}", intruder.bob.id)),
        ("{conversation}", "dm_000000000000000000000000".to_owned()),
        ("{channel}", "no-such-room".to_owned()),
        ("{agent}", "no-such-agent".to_owned()),
        ("{node}", "no-such-node".to_owned()),
        ("{provider}", "broker".to_owned()),
        ("{id}", "1".to_owned()),
    ];
    let mut checked = 0;
    for (method, path, class, body) in ROUTES {
        for (hole, nobodys) in &absent {
            if !path.contains(hole) && !body.contains(hole) || *hole == "{provider}" {
                continue;
            }
            let victims = victim.names.iter().find(|(name, _)| name == hole).map(|(_, value)| value.as_str());
            let victims = victims.unwrap_or_default();
            // All other holes are the intruder's own, so that this one decides.
            let fill = |template: &str, value: &str| intruder.fill(&template.replace(hole, value));
            let tokens =
                [("key", intruder.key.token()), ("agent", &*intruder.ann.token), ("node", &*intruder.node.token)];
            for (who, token) in tokens {
                let lets_in = match class {
                    Class::Key => who == "key",
                    Class::Agent | Class::Acting => who == "agent",
                    Class::Any => who != "node",
                    Class::Sender => who != "key",
                    Class::AnyOrNode => true,
                    Class::None | Class::MaybeKey | Class::Socket => false,
                };
                if !lets_in {
                    continue;
                }
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
                assert!((400..500).contains(&theirs.status), "{what}: {} {}", theirs.status, theirs.body);
                assert_eq!(theirs.status, nobody.status, "{what}: {} and {}", theirs.body, nobody.body);
                assert_eq!(plain(&theirs, victims), plain(&nobody, nobodys), "{what}");
                assert!(is_failure(&theirs), "{what}: {}", theirs.body);
                checked += 1;
            }
        }
    }
    assert!(checked > 40, "only {checked} combinations");
    assert_eq!(victim.state().await?, before, "another tenant changed something");
    // A node enrolled under another tenant's id or name is the intruder's own, and leaves theirs alone.
    let body = json!({ "node_id": victim.node.node_id, "name": victim.node.name, "kind": "ws", "role": "broker" });
    let taken = intruder.key.post("/v1/nodes", body).await?;
    assert!(taken.status < 500, "{}", taken.body);
    assert_eq!(victim.state().await?, before, "enrolling a node of the same id changed another tenant's");
    let ws = Raw::new("GET", format!("{base}/v1/node/ws")).upgrade().bearer(&victim.node.token).send().await?;
    assert_eq!(ws.status, 101, "the victim's node token still works");
    // Neither does a workspace id in the path reach further than the key.
    let other = call(base, "DELETE", &format!("/v1/workspaces/{}", victim.id), "", intruder.key.token()).await?;
    other.refused(404, "workspace_not_found")?;
    Ok(())
}

/// Inside one workspace an agent's mail is its own.
#[tokio::test]
async fn another_agents_mail_is_as_absent_as_none() -> Result<()> {
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
