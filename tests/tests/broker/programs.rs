//! Agent programs with knowledge in the harness table: configuration files in their projects, questions of a first
//! start, and figures for operators.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use relay_testkit::{binaries, wait};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::scene::{SOON, Scene};

/// A program with a file in the project, and one that asks two questions before it takes input.
const HARNESSES: &str = r#"
[planner]
match = ["planner"]
mcp_file = { path = ".planner/mcp.json", key = "mcpServers", variable = "${env:{name}}" }
tool_prefix = "agent-relay."
ready = { prompt = [">"] }
prompt = [">"]

[gated]
match = ["gated"]
ready = { prompt = [">"] }
prompt = [">"]
gates = [
    { name = "mcp-servers", screen = ["Use these servers?"], keys = "y\r" },
    { name = "folder-trust", screen = ["Trust this folder?"], keys = "y\r" },
]
"#;
/// A prompt, then everything that is typed, as the terminal echoes it.
const PLANNER: &str = "#!/bin/sh\nprintf '> '\nexec cat\n";
const GATED: &str = "#!/bin/sh\n\
    printf 'Use these servers? '; read a; printf '\\033[2J\\033[HTrust this folder? '\n\
    read a; printf '\\033[2J\\033[H> '; exec cat\n";

struct Programs {
    scene: Scene,
    folder: TempDir,
}

impl Programs {
    async fn new(name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let table = folder.path().join("harnesses.toml");
        fs::write(&table, HARNESSES)?;
        for (program, script) in [("planner", PLANNER), ("gated", GATED)] {
            let path = folder.path().join(program);
            fs::write(&path, script)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        let args = ["--harnesses", &table.display().to_string(), "--log-format", "text"].map(str::to_owned);
        Ok(Self { scene: Scene::with_args(name, &args).await?, folder })
    }

    async fn spawn(&self, program: &str, name: &str, cwd: PathBuf) -> Result<()> {
        let body = json!({ "name": name, "cli": self.folder.path().join(program), "cwd": cwd });
        let spawned = self.scene.broker.call("POST", "/api/spawn", Some(body)).await?;
        ensure!(spawned.status == 200, "{} {}", spawned.status, spawned.body);
        Ok(())
    }

    async fn verdict(&self, name: &str) -> Result<Value> {
        let verdict = wait::until_ok("the verdict", SOON, || async {
            self.scene.broker.events(name, "delivery_verified").await?.first().cloned().context("no verdict")
        });
        verdict.await.with_context(|| self.scene.broker.log_tail(30))
    }
}

#[tokio::test]
async fn servers_are_merged_into_a_project_and_taken_out_with_the_agent() -> Result<()> {
    let programs = Programs::new("project").await?;
    let project = programs.folder.path().join("project");
    fs::create_dir_all(project.join(".planner"))?;
    let file = project.join(".planner/mcp.json");
    let original = "{ \"mcpServers\": {\"mine\": {\"command\": \"x\"}},  \"theme\": 1 }";
    fs::write(&file, original)?;
    programs.spawn("planner", "planner", project).await?;
    let merged = fs::read_to_string(&file)?;
    let content: Value = serde_json::from_str(&merged)?;
    let servers = content["mcpServers"].as_object().context("servers")?;
    assert_eq!(servers.keys().collect::<Vec<_>>(), ["mine", "agent-relay", "relay-node"]);
    assert_eq!(servers["relay-node"]["env"]["AGENT_RELAY_ACK_TOKEN"], "${env:AGENT_RELAY_ACK_TOKEN}");
    assert_eq!(content["theme"], 1);
    programs.scene.sender.dm("planner", "read this").await?.success()?;
    assert_eq!(programs.verdict("planner").await?["verification"], "echo");
    programs.scene.broker.call("DELETE", "/api/spawned/planner", None).await?;
    assert_eq!(fs::read_to_string(&file)?, original);

    let broker = binaries::find(&binaries::directory()?, "agent-relay-broker")?;
    let table = programs.folder.path().join("harnesses.toml");
    let mut shown = Command::new(&broker);
    shown.args(["mcp-args", "--cli", "planner", "--agent-name", "x", "--cwd", "/project"]);
    let shown = shown.arg("--harnesses").arg(table).output()?;
    let shown: Value = serde_json::from_slice(&shown.stdout)?;
    assert_eq!((&shown["args"], &shown["sideEffectFiles"]), (&json!([]), &json!(["/project/.planner/mcp.json"])));

    let connection = programs.scene.broker.folder().join(".agentworkforce/relay");
    let table = Command::new(&broker).args(["verification", "--state-dir"]).arg(connection).output()?;
    let table = String::from_utf8(table.stdout)?;
    let row = table.lines().find(|line| line.starts_with("planner")).with_context(|| table.clone())?;
    assert!(row.contains("100 %"), "{table}");
    let log = programs.scene.broker.log_tail(5);
    assert!(!log.is_empty() && serde_json::from_str::<Value>(log.lines().last().unwrap_or_default()).is_err(), "{log}");
    Ok(())
}

#[tokio::test]
async fn a_question_is_answered_only_where_the_operator_allows_it() -> Result<()> {
    let programs = Programs::new("gates").await?;
    let scene = &programs.scene;
    programs.spawn("gated", "gated", programs.folder.path().to_owned()).await?;
    scene.sender.dm("gated", "read this").await?.success()?;
    let reported = wait::until_ok("the report of a question", SOON, || async {
        let errors = scene.broker.events("gated", "worker_error").await?;
        errors.first().cloned().context("no report")
    });
    let reported = reported.await.with_context(|| scene.broker.log_tail(30))?;
    assert_eq!(reported["code"], "gate_open", "{reported}");
    let message = reported["message"].as_str().context("a message")?;
    assert!(message.contains("folder-trust"), "the first question was answered, the second was not: {message}");
    assert!(scene.broker.events("gated", "delivery_injected").await?.is_empty(), "its Enter would answer");
    let answered = scene.broker.call("POST", "/api/input/gated", Some(json!({ "data": "y\r" }))).await?;
    assert_eq!(answered.status, 200, "{}", answered.body);
    assert_eq!(programs.verdict("gated").await?["verification"], "echo");
    // The ack follows the verdict.
    wait::until_ok("the wait for the ack", SOON, || async {
        let metrics = scene.broker.call("GET", "/metrics", None).await?.body.to_string();
        ensure!(metrics.contains("relay_node_ack_wait_seconds"), "{metrics}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pipe_in_place_of_a_project_file_delays_no_spawn_and_no_stop() -> Result<()> {
    let programs = Programs::new("pipes").await?;
    let project = programs.folder.path().join("project");
    fs::create_dir_all(project.join(".planner"))?;
    ensure!(Command::new("mkfifo").arg(project.join(".planner/mcp.json")).status()?.success());
    programs.spawn("planner", "first", project).await?;
    programs.spawn("planner", "second", programs.folder.path().to_owned()).await?;
    assert!(programs.folder.path().join(".planner/mcp.json").exists(), "the other project has its servers");
    let status = programs.scene.broker.terminate().await?;
    assert_eq!(status.code(), Some(0), "{}", programs.scene.broker.log_tail(30));
    Ok(())
}
