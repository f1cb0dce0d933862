//! Every route of the listen API with wrong types, sizes, encodings, keys and methods.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use relay_testkit::wait;
use reqwest::header::HeaderValue;
use serde_json::{Map, Value, json};

use super::fields::{Field, Kind};
use crate::scene::{SOON, Scene};

/// Body that a route takes.
#[derive(Debug, Clone, Copy)]
enum Takes {
    Fields(&'static [Field]),
    /// Like `Fields`, and no body at all is taken too.
    OptionalFields(&'static [Field]),
    /// A body is not read.
    Nothing,
    /// The request becomes a WebSocket.
    Upgrade,
}

/// Secret that a route asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    None,
    Broker,
    /// Header and variable of an agent's own token.
    Agent(&'static str, &'static str),
}

struct Route {
    method: &'static str,
    path: &'static str,
    key: Key,
    takes: Takes,
}

const fn route(method: &'static str, path: &'static str, takes: Takes) -> Route {
    Route { method, path, key: Key::Broker, takes }
}

const fn with_key(key: Key, route: Route) -> Route {
    Route { key, ..route }
}

use Kind::{Any, Flag, List, Never, Number, Object, Schema, Text, Word};
use Takes::{Fields, Nothing, OptionalFields, Upgrade};

const CHANNELS: Takes = Fields(&[("channels", List, Some("[]"))]);
const RESULT: Key = Key::Agent("x-agent-result-token", "AGENT_RELAY_RESULT_TOKEN");
const ACK: Key = Key::Agent("x-agent-ack-token", "AGENT_RELAY_ACK_TOKEN");

/// All routes but `POST /api/shutdown`, which the last test calls.
const ROUTES: [Route; 31] = [
    with_key(Key::None, route("GET", "/health", Nothing)),
    route("GET", "/api/session", Nothing),
    route("POST", "/api/session/renew", Nothing),
    route("GET", "/api/config", Nothing),
    route("POST", "/api/spawn", Fields(&SPAWN)),
    route("GET", "/api/spawned", Nothing),
    route("DELETE", "/api/spawned/target", OptionalFields(&[("reason", Text, None)])),
    route("POST", "/api/spawned/target/model", Fields(&[("model", Text, Some("\"m\"")), ("timeout_ms", Number, None)])),
    route("POST", "/api/spawned/target/subscribe", CHANNELS),
    route("POST", "/api/spawned/target/unsubscribe", CHANNELS),
    route("GET", "/api/spawned/target/snapshot", Nothing),
    route("GET", "/api/spawned/target/delivery-mode", Nothing),
    route("PUT", "/api/spawned/target/delivery-mode", Fields(&[("mode", Word, Some("\"auto_inject\""))])),
    route("GET", "/api/spawned/target/pending", Nothing),
    route("POST", "/api/spawned/target/flush", Nothing),
    route("POST", "/api/input/target", Fields(&[("data", Text, Some("\"keys\""))])),
    route("GET", "/api/input/target/stream", Upgrade),
    route("POST", "/api/resize/target", Fields(&[("rows", Number, Some("30")), ("cols", Number, Some("100"))])),
    route("POST", "/api/send", Fields(&SEND)),
    route("GET", "/api/metrics", Nothing),
    route("GET", "/api/status", Nothing),
    route("GET", "/api/crash-insights", Nothing),
    route("POST", "/api/preflight", Fields(&[("agents", List, Some("[]"))])),
    route("GET", "/api/events/replay", Nothing),
    route("GET", "/api/verification", Nothing),
    route("GET", "/metrics", Nothing),
    route("GET", "/ws", Upgrade),
    route("GET", "/api/fleet/ws", Upgrade),
    route("GET", "/api/dead-letters", Nothing),
    with_key(RESULT, route("POST", "/api/agent-result", Fields(&RESULTS))),
    with_key(ACK, route("POST", "/api/delivery-ack", Fields(&ACKS))),
];

pub(super) const SPAWN: [Field; 22] = [
    ("name", Text, Some("\"unwanted\"")),
    ("cli", Text, Some("\"cat\"")),
    ("args", List, None),
    ("transport", Word, None),
    ("provider", Text, None),
    ("model", Text, None),
    ("task", Text, None),
    ("continueFrom", Text, None),
    ("channels", List, None),
    ("workspaceId", Text, None),
    ("cwd", Text, None),
    ("team", Text, None),
    ("idleThresholdSecs", Number, None),
    ("restartPolicy", Object, None),
    ("harnessConfig", Object, None),
    ("spawnMode", Word, None),
    ("exitAfterTask", Flag, None),
    ("skipRelayPrompt", Flag, None),
    ("agentToken", Text, None),
    ("agentResultSchema", Schema, None),
    ("sessionId", Text, None),
    ("harnessId", Never, None),
];

pub(super) const SEND: [Field; 8] = [
    ("to", Text, Some("\"sender\"")),
    ("text", Text, Some("\"unwanted\"")),
    ("from", Text, None),
    ("threadId", Text, None),
    ("workspaceId", Text, None),
    ("workspaceAlias", Text, None),
    ("mode", Word, None),
    ("data", Object, None),
];

const RESULTS: [Field; 3] = [("data", Any, Some("1")), ("final", Flag, None), ("name", Text, None)];
const ACKS: [Field; 3] = [("delivery_id", Text, Some("\"nothing\"")), ("event_id", Text, None), ("status", Word, None)];

/// Bodies that are no JSON object, or have no text or number in this field.
fn broken_bodies(field: &str) -> Vec<Vec<u8>> {
    let within = |value: &[u8]| [&b"{\""[..], field.as_bytes(), b"\":", value, b"}"].concat();
    let nested = within(&b"{\"k\":".repeat(20_000));
    let utf16: Vec<u8> = "{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bodies: [&[u8]; 13] = [
        b"",
        b" \n",
        b"{",
        b"[]",
        b"[\"keys\", \"cat\"]",
        b"null",
        b"7",
        b"true",
        b"\"text\"",
        b"{} {}",
        b"{\"k\":}",
        b"\xef\xbb\xbf{}",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    ];
    let values: [&[u8]; 4] = [b"\"\xff\xfe\"", b"\"\\ud800\"", b"\"\x01\"", b"1e999"];
    let bodies = bodies.into_iter().map(<[u8]>::to_vec).chain(values.map(within));
    bodies.chain([utf16, nested]).collect()
}

/// A scene with one agent, `target`, which writes down what is typed into it, and its own tokens.
pub(super) struct Hostile {
    pub(super) scene: Scene,
    http: reqwest::Client,
    environment: BTreeMap<String, String>,
}

impl Hostile {
    pub(super) async fn new(name: &str) -> Result<Self> {
        let scene = Scene::new(name).await?;
        let folder = scene.broker.folder();
        let (environment, typed) = (folder.join("environment"), folder.join("typed"));
        let script = "env > \"$0.new\"; mv \"$0.new\" \"$0\"; exec cat > \"$1\"";
        let args = json!(["-c", script, environment, typed]);
        let body = json!({ "name": "target", "cli": "sh", "args": args, "agentResultSchema": true });
        let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
        ensure!(spawned.status == 200, "{} {}", spawned.status, spawned.body);
        let variables = wait::until_ok("the environment", SOON, || async { fs::read_to_string(&environment) }).await?;
        let variables = variables.lines().filter_map(|line| line.split_once('='));
        let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        // The broker closes connections of which it does not read everything: none is used twice.
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build()?;
        Ok(Self { scene, http, environment })
    }

    /// Header and secret of a route.
    fn secret(&self, key: Key) -> Result<(&'static str, HeaderValue)> {
        let (header, secret) = match key {
            Key::None => ("x-unused", "x"),
            Key::Broker => ("x-api-key", self.scene.broker.key()),
            Key::Agent(header, variable) => (header, self.environment.get(variable).context("no token")?.as_str()),
        };
        Ok((header, HeaderValue::from_str(secret)?))
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&'static str, HeaderValue)],
        body: Vec<u8>,
    ) -> Result<(u16, Value)> {
        let mut request = self.http.request(method.parse()?, format!("{}{path}", self.scene.broker.url()));
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let answer = request.body(body).send().await.with_context(|| format!("{method} {path}"))?;
        let (status, text) = (answer.status().as_u16(), answer.text().await?);
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Calls a route with its key, and returns an error unless it refuses the body.
    async fn refuses(&self, route: &Route, body: Vec<u8>) -> Result<()> {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        let (status, answer) = self.send(route.method, route.path, &[self.secret(route.key)?], body).await?;
        let is_refused = (400..500).contains(&status) && answer["code"].is_string() && answer["message"].is_string();
        ensure!(is_refused, "{} {} {shown}: {status} {answer}", route.method, route.path);
        Ok(())
    }

    /// Fails if a request has had an effect, or has hurt the broker.
    pub(super) async fn nothing_happened(&self, memory_before: u64) -> Result<()> {
        let names = self.scene.broker.names().await?;
        ensure!(names == ["target"], "{names:?}");
        let typed = fs::read_to_string(self.scene.broker.folder().join("typed"))?;
        ensure!(typed.is_empty(), "typed: {typed:?}");
        let broker = &self.scene.broker;
        let screen = broker.call("GET", "/api/spawned/target/snapshot", None).await?.body;
        ensure!(screen["rows"] == 24 && screen["cols"] == 80, "{screen}");
        ensure!(screen["screen"].as_str().is_some_and(|screen| screen.trim().is_empty()), "{screen}");
        let mode = broker.call("GET", "/api/spawned/target/delivery-mode", None).await?.body;
        ensure!(mode["mode"] == "auto_inject", "{mode}");
        for kind in ["agent_result", "delivery_queued", "worker_error"] {
            let events = broker.events("target", kind).await?;
            ensure!(events.is_empty(), "{events:?}");
        }
        let log = fs::read_to_string(broker.folder().join("broker.log"))?;
        ensure!(!log.contains("panicked"), "{}", broker.log_tail(40));
        let memory_after = super::memory(&self.scene).await?;
        ensure!(memory_after < memory_before + 100, "{memory_before} MB have grown to {memory_after} MB");
        Ok(())
    }
}

/// Body with the fields that it cannot be without.
fn right_body(fields: &[Field]) -> Result<Map<String, Value>> {
    let needed = fields.iter().filter_map(|(name, _, right)| Some((*name, (*right)?)));
    needed.map(|(name, right)| Ok((name.to_owned(), serde_json::from_str(right)?))).collect()
}

#[tokio::test]
async fn every_route_refuses_wrong_bodies_and_does_nothing() -> Result<()> {
    let hostile = Hostile::new("bodies").await?;
    let before = super::memory(&hostile.scene).await?;
    let mut requests = 0;
    for route in &ROUTES {
        let fields = match route.takes {
            Fields(fields) => fields,
            OptionalFields(fields) => fields,
            Nothing | Upgrade => {
                // The rest of a long body that is not read may cost the connection.
                for body in broken_bodies("data").into_iter().filter(|body| body.len() < 1000) {
                    let (status, answer) =
                        hostile.send(route.method, route.path, &[hostile.secret(route.key)?], body).await?;
                    let expected = if matches!(route.takes, Nothing) { status == 200 } else { status < 500 };
                    ensure!(expected, "{} {}: {status} {answer}", route.method, route.path);
                    requests += 1;
                }
                continue;
            }
        };
        let may_be_empty = matches!(route.takes, OptionalFields(_));
        let bodies = broken_bodies(fields[0].0).into_iter();
        for body in bodies.filter(|body| !may_be_empty || !body.trim_ascii().is_empty()) {
            hostile.refuses(route, body).await?;
            requests += 1;
        }
        let right = right_body(fields)?;
        for (name, kind, needed) in fields {
            // Without a program it is `claude`.
            let is_needed = needed.is_some() && *name != "cli";
            let null = (is_needed && *kind != Any).then_some(Value::Null);
            for wrong in kind.wrong_values().into_iter().chain(null) {
                let mut body = right.clone();
                body.insert((*name).to_owned(), wrong);
                hostile.refuses(route, serde_json::to_vec(&body)?).await?;
                requests += 1;
            }
            if is_needed {
                let mut body = right.clone();
                body.remove(*name);
                hostile.refuses(route, serde_json::to_vec(&body)?).await?;
                requests += 1;
            }
        }
        // The broker closes the connection without reading the rest, which a client may notice before the answer.
        let large = [b"{\"data\":\"".to_vec(), vec![b'x'; 9 << 20], b"\"}".to_vec()].concat();
        let answer = wait::until_ok("an answer", SOON, || async {
            hostile.send(route.method, route.path, &[hostile.secret(route.key)?], large.clone()).await
        });
        let (status, answer) = answer.await?;
        ensure!((status, &answer["code"]) == (413, &json!("payload_too_large")), "{}: {status} {answer}", route.path);
    }
    println!("figures hostile bodies: {requests} requests to {} routes", ROUTES.len());
    hostile.nothing_happened(before).await
}

#[tokio::test]
async fn every_route_needs_its_own_key_and_its_method() -> Result<()> {
    let hostile = Hostile::new("keys").await?;
    let before = super::memory(&hostile.scene).await?;
    let key = hostile.scene.broker.key().to_owned();
    let near = format!("{}x", &key[..key.len() - 1]);
    let (result, ack) = (hostile.secret(RESULT)?, hostile.secret(ACK)?);
    let header = |value: &str| HeaderValue::from_str(value);
    let api_keys = [
        header("")?,
        header(&near)?,
        header(&key[..key.len() - 1])?,
        header(&format!("{key}{key}"))?,
        header(&key.to_uppercase())?,
        header(&"k".repeat(16 << 10))?,
        HeaderValue::from_bytes(b"br_\xff\xfe")?,
        result.1.clone(),
        ack.1.clone(),
    ];
    let shutdown = route("POST", "/api/shutdown", Nothing);
    for Route { method, path, key: needed, takes } in ROUTES.iter().chain([&shutdown]) {
        let what = format!("{method} {path}");
        let body = match takes {
            Fields(fields) => serde_json::to_vec(&right_body(fields)?)?,
            OptionalFields(_) | Nothing | Upgrade => Vec::new(),
        };
        let mut wrong: Vec<Vec<(&'static str, HeaderValue)>> = vec![Vec::new()];
        wrong.extend(api_keys.iter().map(|value| vec![("x-api-key", value.clone())]));
        wrong.extend(["Basic", "Bearer x"].map(|scheme| vec![("authorization", HeaderValue::from_static(scheme))]));
        wrong.push(vec![("x-api-key", header(&near)?), ("authorization", header(&format!("Bearer {key}"))?)]);
        match needed {
            Key::None => wrong.clear(),
            Key::Broker => {}
            // The broker's own key opens nothing that is an agent's, and neither does the other token.
            Key::Agent(name, _) => {
                let other = if *needed == RESULT { &ack } else { &result };
                wrong.push(vec![("x-api-key", header(&key)?)]);
                wrong.push(vec![(name, header(&key)?)]);
                wrong.push(vec![(name, other.1.clone())]);
            }
        }
        for headers in wrong {
            let (status, answer) = hostile.send(method, path, &headers, body.clone()).await?;
            ensure!(
                (status, &answer["code"]) == (401, &json!("unauthorized")),
                "{what} {headers:?}: {status} {answer}"
            );
        }
        let page = [hostile.secret(*needed)?, ("origin", HeaderValue::from_static("http://example.org"))];
        let (status, answer) = hostile.send(method, path, &page, body.clone()).await?;
        ensure!((status, &answer["code"]) == (403, &json!("forbidden_origin")), "{what}: {status} {answer}");
        let methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"];
        let is_taken = |method: &str| {
            // Not in the table: forgetting what was learned of programs.
            let is_reset = (method, *path) == ("DELETE", "/api/verification");
            is_reset || (method, *path) == ("POST", "/api/shutdown") || is_in_table(method, path)
        };
        for other in methods.into_iter().filter(|method| !is_taken(method)) {
            let (status, answer) = hostile.send(other, path, &[hostile.secret(Key::Broker)?], body.clone()).await?;
            let code = &answer["code"];
            ensure!((status, code) == (405, &json!("method_not_allowed")), "{other} {path}: {status} {answer}");
        }
    }
    hostile.nothing_happened(before).await?;

    // Whatever comes with it: its own key is enough.
    let stopped = hostile.send("POST", "/api/shutdown", &[hostile.secret(Key::Broker)?], b"{\"x\":".to_vec()).await?;
    assert_eq!(stopped, (200, json!({ "status": "shutting_down" })));
    wait::until_ok("its end", SOON, || async {
        ensure!(!hostile.scene.broker.is_running());
        anyhow::Ok(())
    })
    .await
}

fn is_in_table(method: &str, path: &str) -> bool {
    ROUTES.iter().any(|route| route.method == method && route.path == path)
}

#[tokio::test]
async fn names_and_queries_in_wrong_encodings_are_refused() -> Result<()> {
    let hostile = Hostile::new("encodings").await?;
    let before = super::memory(&hostile.scene).await?;
    let key = [hostile.secret(Key::Broker)?];
    let long = format!("/{}", "n".repeat(8 << 10));
    let names: [(&str, u16); 8] = [
        ("/%FF", 400),
        ("/%C3%28", 400),
        ("/%ED%A0%80", 400),
        ("/%00", 404),
        ("/%2e%2e%2ftarget", 404),
        ("/Target", 404),
        ("/target%20", 404),
        (&long, 404),
    ];
    for route in ROUTES.iter().filter(|route| route.path.contains("/target")) {
        for (name, status) in names {
            let path = route.path.replacen("/target", name, 1);
            let body = match route.takes {
                Fields(fields) => serde_json::to_vec(&right_body(fields)?)?,
                OptionalFields(_) | Nothing | Upgrade => Vec::new(),
            };
            let (found, answer) = hostile.send(route.method, &path, &key, body).await?;
            // Releasing an agent that does not exist succeeds; a name is looked at only after the upgrade of a stream.
            let expected = match (route.method, route.takes, status) {
                ("DELETE", _, 404) => found == 200,
                (_, Upgrade, 404) => (400..500).contains(&found) && answer["code"] == "invalid_request",
                (_, _, 404) => found == 404 && answer["code"] == "agent_not_found",
                _ => found == status && answer["code"] == "invalid_request",
            };
            ensure!(expected, "{} {path}: {found} {answer}", route.method);
        }
    }
    let wrong = [
        ("GET", "/api/spawned/target/snapshot?format=%FF", 400),
        ("GET", "/api/spawned/target/snapshot?format=gif", 400),
        ("GET", "/api/spawned/target/snapshot?format=ansi&format=plain", 400),
        ("GET", "/api/metrics?agent=%FF", 404),
        ("GET", "/api/metrics?agent=nobody", 404),
        ("GET", "/api/verification?agent=%FF", 404),
        ("GET", "/api/events/replay?sinceSeq=-1", 400),
        ("GET", "/api/events/replay?sinceSeq=1.5", 400),
        ("GET", "/api/events/replay?sinceSeq=18446744073709551616", 400),
        ("GET", "/api/events/replay?sinceSeq=%00", 400),
        ("GET", "/api/events/replay?sinceSeq=1&sinceSeq=2", 400),
        ("GET", "/ws?sinceSeq=x", 400),
        ("POST", "/api/dead-letters/%FF/redeliver", 400),
        ("POST", "/api/dead-letters/nothing/redeliver", 404),
        ("GET", "/api/spawned/", 404),
        ("GET", "/api//spawned", 404),
        ("GET", "/api/spawned/target/snapshot/", 404),
        ("GET", "/API/SPAWNED", 404),
        ("GET", "/api/%73pawned/%", 404),
    ];
    for (method, path, status) in wrong {
        let (found, answer) = hostile.send(method, path, &key, Vec::new()).await?;
        ensure!(found == status && answer["code"].is_string(), "{method} {path}: {found} {answer}");
    }
    let far = hostile.send("GET", "/api/events/replay?sinceSeq=18446744073709551615", &key, Vec::new()).await?;
    assert_eq!(far.0, 200, "{}", far.1);
    hostile.nothing_happened(before).await
}
