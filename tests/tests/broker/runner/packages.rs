//! The runner packages for Node.js and Python, as processes beside a real broker and engine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use relay_acceptance::clients;
use relay_testkit::process::{Process, Spec};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::scene::{SOON, Scene};

async fn succeeds(mut command: Command) -> Result<()> {
    let output = command.env("RELAY_RUNNER_TRANSCRIPT", clients::runners().join("transcript.jsonl")).output().await?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{text}");
    Ok(())
}

async fn invoke(scene: &Scene, action: &str, input: Value) -> Result<Value> {
    let caller = scene.sender.clone();
    let invoked = wait::until_ok("an invocation", SOON, || async {
        caller.post(&format!("/v1/actions/{action}/invoke"), json!({ "input": input })).await?.success()
    });
    let id = invoked.await?["invocation_id"].as_str().context("an id")?.to_owned();
    wait::until_ok("the outcome", SOON, || async {
        let outcome = caller.get(&format!("/v1/actions/{action}/invocations/{id}")).await?.success()?;
        ensure!(outcome["status"] == "completed", "{outcome}");
        Ok::<_, anyhow::Error>(outcome["output"].clone())
    })
    .await
}

/// Invokes the action of the examples that spawns an agent, drives it and sends it a message.
async fn dictate(scene: &Scene, agent: &str) -> Result<()> {
    let input = json!({ "name": agent, "keys": "by-hand", "text": "held-message" });
    let output = invoke(scene, "dictate", input).await?;
    let screen = |key: &str| output[key].as_str().with_context(|| format!("{key} of {output}"));
    let (before, after) = (screen("before")?, screen("after")?);
    ensure!(before.contains("by-hand") && !before.contains("held-message"), "{before}");
    ensure!(after.contains("by-hand") && after.contains("held-message"), "{after}");
    ensure!(output["flushed"] == 1, "{output}");
    let mode = scene.broker.call("GET", &format!("/api/spawned/{agent}/delivery-mode"), None).await?.body;
    ensure!(mode["mode"] == "auto_inject", "the mode before comes back: {mode}");
    Ok(())
}

fn start(scene: &Scene, program: &str, example: PathBuf, environment: &[(&str, String)]) -> Result<Process> {
    let folder = scene.broker.folder();
    let mut spec = Spec::new("runner", program, folder.join("runner.log"));
    let connection = folder.join(".agentworkforce/relay/connection.json");
    spec.args = [example, connection].map(|path| path.display().to_string()).to_vec();
    spec.env = environment.iter().map(|(name, value)| ((*name).to_owned(), Some(value.clone()))).collect();
    Process::start(spec)
}

async fn wait_registered(runner: &Process) -> Result<()> {
    wait::until_ok("the runner to be registered", SOON, || async {
        ensure!(runner.log_tail(20).contains("registered"), "{}", runner.log_tail(20));
        Ok::<_, anyhow::Error>(())
    })
    .await
}

async fn stop(runner: &Process) -> Result<()> {
    let status = runner.stop_with(libc::SIGTERM, SOON).await?;
    ensure!(status.success() && runner.log_tail(1) == "stopped", "{status}: {}", runner.log_tail(20));
    Ok(())
}

#[tokio::test]
async fn the_package_for_node_hosts_a_fleet_definition_over_a_broker_restart() -> Result<()> {
    let package = clients::runner_package().await?;
    let mut tests = Command::new("node");
    tests.args(["--test", "dist/test/"]).current_dir(&package);
    succeeds(tests).await?;

    let mut scene = Scene::new("fleet").await?;
    let runner = start(&scene, "node", package.join("example/fleet.mjs"), &[])?;
    wait_registered(&runner).await?;
    assert_eq!(invoke(&scene, "shout", json!({ "text": "hi" })).await?, json!({ "text": "HI" }));
    let spawned = invoke(&scene, "spawn:cat", json!({ "name": "purr" })).await?;
    assert_eq!(spawned["name"], "purr", "{spawned}");
    assert_eq!(scene.broker.names().await?, ["purr"]);
    dictate(&scene, "written").await?;
    let posted = scene.sender.get("/v1/channels/general/messages").await?.success()?;
    assert!(posted.to_string().contains("written has held-message"), "{posted}");

    scene.broker.kill_and_restart().await?;
    assert_eq!(invoke(&scene, "shout", json!({ "text": "again" })).await?, json!({ "text": "AGAIN" }));
    stop(&runner).await
}

#[tokio::test]
async fn the_package_for_python_hosts_a_handler_over_a_broker_restart() -> Result<()> {
    let source = clients::runners().join("python");
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest"]).current_dir(&source).env("PYTHONDONTWRITEBYTECODE", "1");
    succeeds(tests).await?;

    let packages = clients::python_runner_packages().await?;
    let path = std::env::join_paths([source.as_path(), packages.as_path()].map(Path::to_owned))?;
    let environment =
        [("PYTHONPATH", path.to_string_lossy().into_owned()), ("PYTHONDONTWRITEBYTECODE", "1".to_owned())];
    let mut scene = Scene::new("python").await?;
    let runner = start(&scene, "python3", source.join("example/shout.py"), &environment)?;
    wait_registered(&runner).await?;
    assert_eq!(invoke(&scene, "shout", json!({ "text": "hi" })).await?, json!({ "text": "HI" }));
    dictate(&scene, "written").await?;
    scene.broker.kill_and_restart().await?;
    assert_eq!(invoke(&scene, "shout", json!({ "text": "again" })).await?, json!({ "text": "AGAIN" }));
    stop(&runner).await
}
