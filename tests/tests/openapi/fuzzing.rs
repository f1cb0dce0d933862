//! Schemathesis against running gateways: valid and invalid requests generated from the OpenAPI document. No answer may
//! be a 5xx, or have an undocumented status, content type or body.
//!
//! The requests follow from the seed and the engine's answers. Each failing case is printed with a `curl` command that
//! repeats it.

use anyhow::Result;
use relay_acceptance::clients::Script;
use relay_testkit::client::{Agent, Api};
use relay_testkit::shared;
use serde_json::{Value, json};

/// The last check is defined in `clients/openapi_hooks.py`.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,\
                      response_headers_conformance,undocumented_fields";

/// Operations that end the run's own credentials, or never end.
const LEFT_OUT: [&str; 4] = ["workspaces_delete", "workspaces_delete_by_id", "agents_rotate_token", "observers_stream"];

/// Workspace with the objects of the document's examples, and one object for every id in a path.
struct Fuzzed {
    key: Api,
    /// Her token is used, because no example names her.
    carol: Agent,
    /// Existing values by the segment before a path parameter.
    real: Value,
    /// Observer token with every scope.
    observer: String,
}

/// All scopes of an observer token.
const SCOPES: [&str; 12] = [
    "stream:read",
    "messages:read",
    "threads:read",
    "dms:read",
    "channels:read",
    "search:read",
    "agents:read",
    "nodes:read",
    "deliveries:read",
    "activity:read",
    "files:read",
    "reactions:read",
];

impl Fuzzed {
    async fn new(base: &str, name: &str) -> Result<Self> {
        let key = Api::create_workspace(base, name).await?;
        let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
        let carol = key.register_agent("carol").await?;
        let (as_ada, as_bob, as_carol) = (key.as_agent(&ada), key.as_agent(&bob), key.as_agent(&carol));
        let message = as_ada.post_message("general", "hello @bob").await?.success()?;
        let dm = as_bob.dm("carol", "hello").await?.success()?;
        let group = as_carol.post("/v1/dm/group", json!({ "participants": ["ada", "bob"] })).await?.success()?;
        key.create_broker_node("node_243812600000000001", "build-box").await?;
        let filters = json!({ "include_dms": true });
        let observer = json!({ "name": "watcher", "scopes": SCOPES, "filters": filters });
        let observer = key.post("/v1/observer-tokens", observer).await?.success()?;
        // Target of rotations and revocations.
        let other = json!({ "name": "other", "scopes": ["agents:read"] });
        let other = key.post("/v1/observer-tokens", other).await?.success()?;
        let file = json!({ "filename": "report.pdf", "content_type": "application/pdf", "size_bytes": 4 });
        let file = as_carol.post("/v1/files/upload", file).await?.success()?;
        let webhook = key.post("/v1/webhooks", json!({ "channel": "general" })).await?.success()?;
        let subscription = json!({ "events": ["message.created"], "url": "https://example.com/relay" });
        let subscription = key.post("/v1/subscriptions", subscription).await?.success()?;
        let trigger =
            key.post("/v1/triggers", json!({ "channel": "general", "action_name": "build" })).await?.success()?;
        let (message, direct) = (text(&message["id"]), text(&dm["id"]));
        let real = json!({
            "agents": ["ada", "bob", "carol"],
            "participants": ["ada"],
            "channels": ["general"],
            "messages": [message, direct],
            "dm": [dm["conversation_id"], group["id"]],
            "conversations": [dm["conversation_id"], group["id"]],
            "deliveries": [format!("del_{message}_{}", carol.id), format!("del_{direct}_{}", carol.id)],
            "nodes": ["build-box"],
            "reactions": ["thumbsup"],
            "observer-tokens": [other["id"]],
            "files": [file["id"]],
            "webhooks": [webhook["id"]],
            "hooks": [webhook["id"]],
            "subscriptions": [subscription["id"]],
            "triggers": [trigger["id"]],
            "console": ["app.js", "console.css", "icon.svg"],
        });
        let observer = text(&observer["token"]).to_owned();
        Ok(Self { key, carol, real, observer })
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Without a capable node these answer 503 as documented.
const CONFIGURATION: &str = r#"
[[operations]]
include-operation-id = ["agents_spawn", "agents_release", "agents_release_exact", "actions_invoke", "actions_invoke_on_node"]

[operations.checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503]
"#;

async fn fuzz(name: &str, base: &str, fuzzed: &Fuzzed, token: &str) -> Result<()> {
    let (document, authorization) = (format!("{base}/openapi.json"), format!("Authorization: Bearer {token}"));
    // Reports and caches are written to the working directory.
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("schemathesis.toml"), CONFIGURATION)?;
    let script =
        Script::schemathesis(name).await?.timeout(folder.path()).env("RELAY_FUZZ_REAL", fuzzed.real.to_string());
    let script = script.args(["run", &document, "--header", &authorization, "--checks", CHECKS, "--seed", "20260301"]);
    let script = script.args(["--max-examples", "6", "--workers", "2", "--request-timeout", "35", "--no-color"]);
    let script = script.args(["--generation-database", "none", "--warnings", "off", "--suppress-health-check", "all"]);
    let script = script.args(LEFT_OUT.iter().flat_map(|operation| ["--exclude-operation-id", operation]));
    script.run(async |request| panic!("{request:?} was not expected")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_workspace_key_every_answer_is_as_documented() -> Result<()> {
    let base = shared().await.any_gateway();
    let fuzzed = Fuzzed::new(base, "fuzzed-key").await?;
    fuzz("schemathesis with a key", base, &fuzzed, fuzzed.key.token()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_an_agent_token_every_answer_is_as_documented() -> Result<()> {
    let base = shared().await.any_gateway();
    let fuzzed = Fuzzed::new(base, "fuzzed-agent").await?;
    fuzz("schemathesis with an agent", base, &fuzzed, &fuzzed.carol.token).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_an_observer_token_every_answer_is_as_documented() -> Result<()> {
    let base = shared().await.any_gateway();
    let fuzzed = Fuzzed::new(base, "fuzzed-observer").await?;
    fuzz("schemathesis with an observer", base, &fuzzed, &fuzzed.observer).await
}
