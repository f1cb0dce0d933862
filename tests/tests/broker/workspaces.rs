//! One broker in several workspaces: `RELAY_WORKSPACES_JSON`.

use anyhow::{Context, Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

use crate::scene::SOON;

struct Member {
    alias: &'static str,
    id: String,
    workspace: Api,
    sender: Api,
}

impl Member {
    async fn new(alias: &'static str) -> Result<Self> {
        let workspace = Api::create_workspace(shared().await.any_gateway(), alias).await?;
        let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
        let id = workspace.get("/v1/workspace").await?.success()?["id"].as_str().context("an id")?.to_owned();
        Ok(Self { alias, id, workspace, sender })
    }

    fn entry(&self) -> Value {
        json!({ "workspace_id": self.id, "workspace_alias": self.alias, "api_key": self.workspace.token() })
    }

    /// Waits until an agent has this message as its last one, with the workspace in its header.
    async fn arrives(&self, agent: &FakeAgent, sender: &str, body: &str) -> Result<()> {
        let (start, end) = (format!("Relay message from {sender} [{} / ", self.alias), format!("]: {body}"));
        wait::until_ok("the message", SOON, || async {
            let last = agent.messages().pop().map(|(_, text)| text).context("nothing has come")?;
            ensure!(last.starts_with(&start) && last.ends_with(&end), "{last}");
            anyhow::Ok(())
        })
        .await
    }
}

#[tokio::test]
async fn agents_of_several_workspaces_run_side_by_side() -> Result<()> {
    let (one, two) = (Member::new("one").await?, Member::new("two").await?);
    let folder = tempfile::tempdir()?;
    let mut spec = BrokerSpec::new(one.workspace.base(), "", "both", folder.path())?;
    let list = json!([two.entry(), one.entry()]).to_string();
    spec.env = [("RELAY_WORKSPACES_JSON", list.as_str()), ("RELAY_DEFAULT_WORKSPACE", "one")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    let mut broker = NodeBroker::start(&spec).await?;
    let status = broker.call("GET", "/api/status", None).await?.body;
    assert_eq!(status["auth"]["workspace_count"], 2, "{status}");
    assert_eq!(status["auth"]["default_workspace_id"], one.id.as_str());
    let health = broker.call_with("GET", "/health", &[]).await?.body;
    let aliases: Vec<&Value> =
        health["memberships"].as_array().context("a list")?.iter().map(|m| &m["workspace_alias"]).collect();
    assert_eq!(aliases, ["one", "two"], "{health}");
    ensure!(!health.to_string().contains("rk_live"), "{health}");

    let agent = |name: &str| FakeAgent::new("cooked", folder.path().join(format!("{name}.log")), &[]);
    let (here, there) = (agent("here"), agent("there"));
    for (agent, name, fields) in [(&here, "here", json!({})), (&there, "there", json!({ "workspaceAlias": "two" }))] {
        let spawned = broker.spawn(agent, name, fields).await?;
        ensure!(spawned.status == 200, "{}", spawned.body);
    }
    one.sender.dm("here", "first").await?.success()?;
    two.sender.dm("there", "second").await?.success()?;
    one.arrives(&here, "sender", "first").await?;
    two.arrives(&there, "sender", "second").await?;
    ensure!(one.sender.dm("there", "astray").await?.status == 404, "an agent of another workspace is reached");

    // A driver's message goes to the workspace that it names, or to that of its author.
    let sent = json!({ "to": "there", "text": "third", "workspaceId": two.id });
    let sent = broker.call("POST", "/api/send", Some(sent)).await?;
    assert_eq!((sent.status, &sent.body["workspace_alias"], &sent.body["local"]), (200, &json!("two"), &json!(true)));
    two.arrives(&there, "both", "third").await?;
    let sent = json!({ "to": "sender", "text": "hello", "from": "there" });
    let sent = broker.call("POST", "/api/send", Some(sent)).await?;
    assert_eq!((sent.status, &sent.body["workspace_id"]), (200, &json!(two.id)), "{}", sent.body);
    for (path, body) in [
        ("/api/send", json!({ "to": "there", "text": "x", "workspaceAlias": "three" })),
        ("/api/spawn", json!({ "name": "nowhere", "cli": "cat", "workspaceId": "three" })),
    ] {
        let refused = broker.call("POST", path, Some(body)).await?;
        assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    }

    broker.kill_and_restart().await?;
    one.sender.dm("here", "fourth").await?.success()?;
    two.sender.dm("there", "fifth").await?.success()?;
    one.arrives(&here, "sender", "fourth").await?;
    two.arrives(&there, "sender", "fifth").await?;
    ensure!(broker.terminate().await?.success(), "{}", broker.log_tail(20));
    Ok(())
}

#[tokio::test]
async fn a_workspace_created_without_a_key_is_found_again_after_a_kill() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let spec = BrokerSpec::new(shared().await.any_gateway(), "", "homeless", folder.path())?;
    let mut broker = NodeBroker::start(&spec).await?;
    let workspace = async |broker: &NodeBroker| {
        let status = broker.call("GET", "/api/status", None).await?.body;
        status["auth"]["default_workspace_id"].as_str().map(str::to_owned).context("an id")
    };
    let created = workspace(&broker).await?;
    let agent = FakeAgent::new("cooked", folder.path().join("worker.log"), &[]);
    let spawned = broker.spawn(&agent, "worker", json!({})).await?;
    ensure!(spawned.status == 200, "{}", spawned.body);

    broker.kill_and_restart().await?;
    assert_eq!(workspace(&broker).await?, created);
    wait::until_ok("the agent", SOON, || async {
        ensure!(broker.names().await? == ["worker"], "{}", broker.log_tail(20));
        anyhow::Ok(())
    })
    .await?;
    ensure!(broker.terminate().await?.success(), "{}", broker.log_tail(20));
    Ok(())
}
