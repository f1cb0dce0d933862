//! Secrets in every place where one can enter a broker, and a search of every place where something comes out of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use futures::StreamExt as _;
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, NodeBroker};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use super::state_folder;
use crate::scene::SOON;

/// Routes whose answers are searched.
const ROUTES: [&str; 18] = [
    "/health",
    "/metrics",
    "/api/session",
    "/api/config",
    "/api/status",
    "/api/metrics",
    "/api/spawned",
    "/api/crash-insights",
    "/api/dead-letters",
    "/api/verification",
    "/api/events/replay?sinceSeq=0",
    "/api/spawned/one/snapshot",
    "/api/spawned/one/pending",
    "/api/spawned/two/snapshot",
    "/api/spawned/two/delivery-mode",
    "/api/metrics?agent=one",
    "/api/verification?agent=two",
    "/no/such/route",
];

/// A secret, and the places that may show it. Nothing else may.
#[derive(Debug)]
struct Secret {
    name: String,
    value: String,
    allowed: &'static [&'static str],
}

/// Secrets by name.
#[derive(Debug, Default)]
struct Secrets(Vec<Secret>);

impl Secrets {
    fn add(&mut self, name: &str, value: &str, allowed: &'static [&'static str]) {
        self.0.push(Secret { name: name.to_owned(), value: value.to_owned(), allowed });
    }

    /// Invents a secret and returns it.
    fn plant(&mut self, name: &str, allowed: &'static [&'static str]) -> String {
        let value = format!("planted-{name}-5b1f{:x}", self.0.len());
        self.add(name, &value, allowed);
        value
    }

    /// Fails if a place shows a secret that it may not show.
    fn check(&self, places: &BTreeMap<String, String>) -> Result<()> {
        let shown = places.iter().flat_map(|(place, text)| {
            let found = self.0.iter().filter(|secret| text.contains(&secret.value));
            let found = found.filter(|secret| !secret.allowed.contains(&place.as_str()));
            found.map(move |secret| format!("{place} shows {}: {}", secret.name, around(text, &secret.value)))
        });
        let shown: Vec<String> = shown.collect();
        ensure!(shown.is_empty(), "{}", shown.join("\n"));
        Ok(())
    }

    /// Fails if a place that must have a secret does not show it: then the search finds nothing.
    fn check_given(&self, places: &BTreeMap<String, String>) -> Result<()> {
        for Secret { name, value, allowed } in &self.0 {
            for place in *allowed {
                let text = places.get(*place).with_context(|| format!("{place} was not searched"))?;
                ensure!(text.contains(value), "{place} has no {name}");
            }
        }
        Ok(())
    }
}

/// The text in front of a place, without the secret itself.
fn around<'a>(text: &'a str, value: &str) -> &'a str {
    let at = text.find(value).unwrap_or_default();
    let from = (0..=at.saturating_sub(200)).rev().find(|index| text.is_char_boundary(*index)).unwrap_or_default();
    &text[from..at]
}

const ONE: &str = "environment of one";
const TWO: &str = "environment of two";
const RUNNER: &str = "environment of the runner's program";

async fn workspace(name: &str) -> Result<(Api, String)> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let id = workspace.get("/v1/workspace").await?.success()?["id"].as_str().context("an id")?.to_owned();
    Ok((workspace, id))
}

/// Variables of a process.
fn environment(pid: &Value) -> Result<BTreeMap<String, String>> {
    let content = fs::read(format!("/proc/{pid}/environ"))?;
    let text = String::from_utf8(content)?;
    let variables = text.split('\0').filter_map(|variable| variable.split_once('='));
    Ok(variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

fn listing(environment: &BTreeMap<String, String>) -> String {
    environment.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Requests with secrets in places where they are wrong; their answers are searched.
async fn wrong_requests(broker: &NodeBroker, secret: &str) -> Result<String> {
    let spawn = |config: Value| json!({ "name": "wrong", "harnessConfig": config });
    let bodies = [
        ("/api/spawn", spawn(json!({ "command": "cat", "env": format!("KEY={secret}") }))),
        ("/api/spawn", spawn(json!({ "command": "cat", "env": { "KEY": [secret] } }))),
        ("/api/spawn", spawn(json!({ "command": "/no/such/program", "env": { "KEY": secret } }))),
        ("/api/spawn", spawn(json!({ "runtime": "headless", "auth": { "type": secret } }))),
        ("/api/spawn", spawn(json!({ "runtime": "headless", "auth": secret }))),
        (
            "/api/spawn",
            spawn(json!({ "runtime": "headless", "protocol": "opencode", "sessionId": "s",
                                    "endpoint": format!("http://me:{secret}@example.org/") })),
        ),
        ("/api/spawn", json!({ "name": "wrong", "cli": "cat", "agentToken": { "token": secret } })),
        ("/api/spawn", json!({ "name": "wrong", "cli": "cat", "agentToken": format!("at_live_{secret}") })),
        ("/api/send", json!({ "to": "one", "text": "x", "data": secret })),
        ("/api/preflight", json!({ "agents": secret })),
    ];
    let mut answers = String::new();
    for (path, body) in bodies {
        let answer = broker.call("POST", path, Some(body)).await?;
        ensure!(answer.status >= 400, "{path}: {} {}", answer.status, answer.body);
        answers.push_str(&answer.body.to_string());
    }
    let bearer = format!("Bearer {secret}");
    let headers: [&[(&str, &str)]; 3] =
        [&[("x-api-key", secret)], &[("authorization", &bearer)], &[("x-api-key", secret), ("origin", "http://x")]];
    for headers in headers {
        answers.push_str(&broker.call_with("GET", "/api/status", headers).await?.body.to_string());
    }
    for (path, header) in [("/api/agent-result", "x-agent-result-token"), ("/api/delivery-ack", "x-agent-ack-token")] {
        let api = Api::anonymous(broker.url());
        let refused = api.call("POST".parse()?, path, Some(json!({})), &[(header, secret)]).await?;
        ensure!(refused.status == 401, "{} {}", refused.status, refused.body);
        answers.push_str(&refused.body.to_string());
    }
    Ok(answers)
}

/// Frames of a subscriber of all events, until the one of this agent and kind.
async fn stream_until(broker: &NodeBroker, name: &str, kind: &str) -> Result<String> {
    let mut request = broker.socket_url("/ws?sinceSeq=0").into_client_request()?;
    request.headers_mut().insert("x-api-key", broker.key().parse()?);
    let (mut socket, _) = connect_async(request).await?;
    let mut frames = String::new();
    loop {
        let frame = tokio::time::timeout(SOON, socket.next()).await?.context("the stream has ended")??;
        let text = frame.into_text()?;
        frames.push_str(&text);
        let event: Value = serde_json::from_str(&text).unwrap_or_default();
        if event["name"] == name && event["kind"] == kind {
            return Ok(frames);
        }
    }
}

/// A runner with a secret for its program, which the broker starts when the runner is gone.
async fn supervised_environment(broker: &NodeBroker, secret: &str, wrong: &str) -> Result<(String, String)> {
    let mut runner = crate::runner::Runner::connect_to(broker).await?;
    let register = |env: Value| {
        let script = "env > runner.new; mv runner.new runner.env; exec sleep 600";
        let supervision = json!({ "argv": ["sh", "-c", script], "cwd": broker.folder(), "env": env });
        json!({ "manifest": { "name": "planted", "capabilities": [] }, "supervision": supervision })
    };
    let mut answers = String::new();
    for env in [json!(wrong), json!({ "KEY": [wrong] })] {
        let refused = runner.ask("register_node", register(env)).await?;
        ensure!(refused["type"] == "error", "{refused}");
        answers.push_str(&refused.to_string());
    }
    let registered = runner.ask("register_node", register(json!({ "PLANTED": secret }))).await?;
    ensure!(registered["type"] == "ok", "{registered}");
    for kind in ["get_status", "list_agents", "get_metrics", "get_crash_insights"] {
        answers.push_str(&runner.ask(kind, json!({})).await?.to_string());
    }
    drop(runner);
    let file = broker.folder().join("runner.env");
    let environment = wait::until_ok("the runner's program", SOON, || async { fs::read_to_string(&file) }).await?;
    Ok((environment, answers))
}

/// Starts brokers on state files with a secret in a place where it cannot be read, and returns what they log.
async fn logs_on_wrong_files(spec: &BrokerSpec, secret: &str) -> Result<String> {
    let state = state_folder(&spec.folder);
    let mut logs = String::new();
    let mut count = 0;
    for entry in fs::read_dir(&state)? {
        let path = entry?.path();
        let Ok(content) = fs::read(&path) else { continue };
        let Ok(Value::Object(mut fields)) = serde_json::from_slice(&content) else { continue };
        for (name, value) in &mut fields {
            if name != "version" {
                *value = json!(secret);
            }
        }
        count += 1;
        fs::write(&path, serde_json::to_vec(&fields)?)?;
        // It may refuse the file.
        if let Ok(broker) = NodeBroker::start(spec).await {
            broker.terminate().await?;
        }
        logs.push_str(&fs::read_to_string(spec.folder.join("broker.log"))?);
        fs::write(&path, content)?;
    }
    ensure!(count >= 4, "only {count} files of {} were read", state.display());
    Ok(logs)
}

/// Tokens in the node token files.
fn node_tokens(folder: &Path) -> Result<Vec<String>> {
    let mut tokens = Vec::new();
    for entry in fs::read_dir(state_folder(folder))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("node-token") {
            let content: Value = serde_json::from_slice(&fs::read(entry.path())?)?;
            tokens.push(content["token"].as_str().context("a token")?.to_owned());
        }
    }
    Ok(tokens)
}

#[tokio::test]
async fn planted_secrets_are_found_only_where_they_belong() -> Result<()> {
    let mut secrets = Secrets::default();
    let ((first, first_id), (second, second_id)) = (workspace("first").await?, workspace("second").await?);
    secrets.add("key of the first workspace", first.token(), &[ONE, "/api/session", "/api/config"]);
    secrets.add("key of the second workspace", second.token(), &[TWO]);
    let own_token = second.register_agent("two").await?.token;
    secrets.add("token that the spawn of two brings", &own_token, &[TWO]);

    let folder = tempfile::tempdir()?;
    let mut spec = BrokerSpec::new(first.base(), "", "planted", folder.path())?;
    let list = json!([
        { "workspace_id": first_id, "workspace_alias": "first", "api_key": first.token() },
        { "workspace_id": second_id, "workspace_alias": "second", "api_key": second.token() },
    ]);
    let inherited = secrets.plant("inherited", &[ONE, TWO, RUNNER]);
    let environment_key = secrets.plant("api-key-in-the-environment", &[]);
    let withheld_url = secrets.plant("url-in-the-environment", &[]);
    spec.env = [
        ("RUST_LOG", "trace"),
        ("RELAY_WORKSPACES_JSON", &list.to_string()),
        ("RELAY_DEFAULT_WORKSPACE", "first"),
        ("DATABASE_PASSWORD", &inherited),
        ("RELAY_BROKER_API_KEY", &environment_key),
        ("RELAY_BROKER_URL", &format!("http://me:{withheld_url}@127.0.0.1:1")),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    spec.args = ["--api-key", &secrets.plant("api-key-in-the-arguments", &[])].map(str::to_owned).to_vec();
    let mut broker = NodeBroker::start(&spec).await?;

    let crashing = secrets.plant("environment-of-a-crash", &[]);
    let spawns = [
        json!({ "name": "one", "agentResultSchema": true, "workspaceAlias": "first",
                "harnessConfig": { "runtime": "pty", "command": "cat",
                                   "env": { "PLANTED": secrets.plant("environment-of-one", &[ONE]) } } }),
        json!({ "name": "two", "agentToken": own_token, "workspaceAlias": "second",
                "harnessConfig": { "runtime": "pty", "command": "cat",
                                   "env": { "PLANTED": secrets.plant("environment-of-two", &[TWO]) } } }),
        json!({ "name": "server", "workspaceAlias": "first", "harnessConfig": {
                "runtime": "headless", "driver": "app_server", "protocol": "opencode", "sessionId": "s",
                "endpoint": format!("http://me:{}@127.0.0.1:1/", secrets.plant("endpoint", &[])),
                "auth": { "type": "bearer", "token": secrets.plant("bearer", &[]) } } }),
        json!({ "name": "crash", "workspaceAlias": "first",
                "harnessConfig": { "runtime": "pty", "command": "sh", "args": ["-c", "exit 3"],
                                   "env": { "PLANTED": crashing } } }),
    ];
    for body in spawns {
        let spawned = broker.call("POST", "/api/spawn", Some(body)).await?;
        ensure!(spawned.status == 200, "{}\n{}", spawned.body, broker.log_tail(20));
    }
    let mut places = BTreeMap::new();
    let wrong = secrets.plant("wrong-place", &[]);
    places.insert("answers to wrong requests".to_owned(), wrong_requests(&broker, &wrong).await?);
    let runner = secrets.plant("environment-of-the-runner", &[RUNNER]);
    let (environment_of_runner, answers) = supervised_environment(&broker, &runner, &wrong).await?;
    places.extend([(RUNNER.to_owned(), environment_of_runner), ("answers to the runner".to_owned(), answers)]);

    // A message to an agent, and one that fails.
    for (workspace, to) in [(&first, "one"), (&second, "two"), (&first, "server")] {
        let sender = workspace.as_agent(&workspace.register_agent(&format!("to-{to}")).await?);
        sender.dm(to, "hello").await?.success()?;
    }
    let stream = stream_until(&broker, "server", "delivery_failed").await.with_context(|| broker.log_tail(20))?;
    places.insert("the stream of events".to_owned(), stream);

    for is_restarted in [false, true] {
        if is_restarted {
            broker.kill_and_restart().await?;
            broker.wait_connected().await?;
        }
        let list = wait::until_ok("the agents", SOON, || async {
            let list = broker.call("GET", "/api/spawned", None).await?.body;
            let agents = list["agents"].as_array().context("a list")?.clone();
            ensure!(agents.len() == 3, "{list}");
            anyhow::Ok(agents)
        });
        for agent in list.await? {
            let name = agent["name"].as_str().context("a name")?.to_owned();
            if name == "server" {
                continue;
            }
            let variables = environment(&agent["pid"])?;
            let (place, own): (_, &'static [&'static str]) = if name == "one" { (ONE, &[ONE]) } else { (TWO, &[TWO]) };
            // Tokens are new for each process.
            secrets.0.retain(|secret| !secret.name.starts_with(&format!("{name}'s ")));
            for variable in ["RELAY_AGENT_TOKEN", "AGENT_RELAY_ACK_TOKEN", "AGENT_RELAY_RESULT_TOKEN"] {
                match variables.get(variable) {
                    Some(token) => secrets.add(&format!("{name}'s {variable}"), token, own),
                    None => ensure!(name == "two" && variable.ends_with("RESULT_TOKEN"), "{name} has no {variable}"),
                }
            }
            places.insert(place.to_owned(), listing(&variables));
        }
        let tokens = node_tokens(broker.folder())?;
        ensure!(tokens.len() == 2, "{} node tokens", tokens.len());
        tokens.iter().for_each(|token| secrets.add("token of a node", token, &[]));
        for route in ROUTES {
            places.insert(route.to_owned(), broker.call("GET", route, None).await?.body.to_string());
        }
        let log = fs::read_to_string(broker.folder().join("broker.log"))?;
        ensure!(log.contains("\"level\":\"TRACE\""), "the log has no lines at the level `trace`");
        places.insert(format!("the log (restarted: {is_restarted})"), log);
        secrets.check(&places)?;
        secrets.check_given(&places)?;
    }
    ensure!(places["/api/crash-insights"].contains("crash"), "no crash was recorded");
    broker.terminate().await?;
    let in_files = secrets.plant("state-files", &[]);
    places.insert("logs on wrong state files".to_owned(), logs_on_wrong_files(&spec, &in_files).await?);
    println!("figures secrets: {} secrets searched in {} places", secrets.0.len(), places.len());
    secrets.check(&places)
}
