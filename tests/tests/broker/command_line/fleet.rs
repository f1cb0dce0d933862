//! Definitions of `@agent-relay/fleet`, unmodified, served by the published command line.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use relay_testkit::process::{Process, Spec};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::command_line::CommandLine;
use crate::scene::SOON;

/// File with a definition beside the packages, where its import is found.
struct Definition(PathBuf);

impl Definition {
    fn write(cli: &CommandLine, name: &str, text: &str) -> Result<Self> {
        let file = cli.packages.join(format!("{name}-{}.mjs", std::process::id()));
        std::fs::write(&file, text)?;
        Ok(Self(file))
    }

    fn serve(&self, cli: &CommandLine) -> Result<Process> {
        let mut spec = Spec::new("fleet", "node", cli.folder.path().join("fleet.log"));
        let program = cli.program().display().to_string();
        // It reads no variable for the address at which it creates triggers.
        let args = [&program, "fleet", "serve", &self.0.display().to_string(), "--base-url", &cli.gateway];
        spec.args = args.map(str::to_owned).to_vec();
        spec.env = cli.environment()?;
        spec.cwd = Some(cli.folder.path().to_owned());
        Process::start(spec)
    }
}

impl Drop for Definition {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Ends the command and its broker.
async fn stop(cli: &CommandLine, serving: &Process) -> Result<()> {
    ensure!(Command::new("kill").arg(serving.pid().to_string()).status().await?.success());
    cli.run(&["local", "down"]).await?;
    wait::until_ok("the command to end with its broker", SOON, || async {
        ensure!(!serving.is_running() && cli.connection().is_err(), "it runs");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn the_command_line_serves_a_fleet_definition() -> Result<()> {
    let cli = CommandLine::new("fleet-serve").await?;
    let definition = Definition::write(
        &cli,
        "fleet",
        "import { action, defineNode } from '@agent-relay/fleet';\n\
         const shout = action({}, (input) => ({ text: String(input.text).toUpperCase() }));\n\
         export default defineNode({ name: 'served', capabilities: { shout } });\n",
    )?;
    let serving = definition.serve(&cli)?;
    let invoked = wait::until_ok("an invocation", SOON, || async {
        cli.sender.post("/v1/actions/shout/invoke", json!({ "input": { "text": "hi" } })).await?.success()
    });
    let id =
        invoked.await.with_context(|| serving.log_tail(30))?["invocation_id"].as_str().context("an id")?.to_owned();
    wait::until_ok("the outcome", SOON, || async {
        let outcome = cli.sender.get(&format!("/v1/actions/shout/invocations/{id}")).await?.success()?;
        ensure!(outcome["output"] == json!({ "text": "HI" }), "{outcome}");
        anyhow::Ok(())
    })
    .await
    .with_context(|| serving.log_tail(30))?;
    let nodes = cli.run(&["fleet", "nodes"]).await?;
    assert!(nodes.contains("shout"), "{nodes}");
    // It takes the definition back and goes on with its broker until that is stopped.
    ensure!(Command::new("kill").arg(serving.pid().to_string()).status().await?.success());
    wait::until_ok("the definition to be taken back", SOON, || async {
        let nodes = cli.run(&["fleet", "nodes"]).await?;
        ensure!(!nodes.contains("shout"), "{nodes}");
        anyhow::Ok(())
    })
    .await?;
    stop(&cli, &serving).await
}

/// A handler that answers messages of a channel and of a mention.
const REPORTER: &str = "\
import { action, defineNode, onMessage } from '@agent-relay/fleet';
const report = action({}, async ({ message }, { relay, invocationId }) => {
  // Without the words that would make it fire a trigger again.
  const text = `report of ${message.text.replace(/please |kindly /, '')} by ${message.agent_name}`;
  await relay.sendMessage({ to: `#${message.channel_name}`, text, threadId: message.id });
  return { invocationId };
});
const triggers = [
  onMessage({ channel: '#general', match: /^[Dd]one/ }, 'report'),
  onMessage({ channel: 'general', match: 'please', mention: 'sender' }, 'report'),
  onMessage({ channel: 'general', match: 'kindly', mention: true }, 'report'),
];
export default defineNode({ name: 'reporter', capabilities: { report }, triggers });
";

/// Place in which a broker posts the messages that a handler sends with a `threadId`.
#[derive(Clone, Copy)]
enum Answers {
    InThread,
    /// The published broker ignores the thread.
    InChannel,
}

/// Posts over the second gateway and waits for the handler's answer.
async fn post_and_wait(cli: &CommandLine, text: &str, answers: Answers, serving: &Process) -> Result<()> {
    let posted = cli.sender.post_message("general", text).await?.success()?;
    let list = match answers {
        Answers::InThread => format!("/v1/messages/{}/replies", posted["id"].as_str().context("an id")?),
        Answers::InChannel => "/v1/channels/general/messages".to_owned(),
    };
    let expected = format!("report of {} by sender", text.replace("please ", "").replace("kindly ", ""));
    wait::until_ok(&format!("the report of {text}"), SOON, || async {
        let listed = cli.sender.get(&list).await?.success()?;
        let messages = match answers {
            Answers::InThread => &listed["replies"],
            Answers::InChannel => &listed,
        };
        let reports = messages.as_array().into_iter().flatten().filter(|message| message["text"] == expected);
        ensure!(reports.count() == 1, "{listed}");
        anyhow::Ok(())
    })
    .await
    .with_context(|| serving.log_tail(30))
}

async fn messages_fire_and_are_sent(cli: CommandLine, answers: Answers) -> Result<()> {
    let definition = Definition::write(&cli, "reporter", REPORTER)?;
    for run in ["first", "second"] {
        let serving = definition.serve(&cli)?;
        wait::until_ok("the definition to be served", SOON, || async {
            let log = serving.log_tail(30);
            ensure!(log.contains("registered"), "{log}");
            // The engine knows of it a moment later; a message before that would invoke nothing.
            let nodes = cli.sender.get("/v1/nodes?capability=report").await?.success()?;
            ensure!(nodes[0]["handlers_live"] == true, "{nodes}");
            anyhow::Ok(())
        })
        .await?;
        // Neither the pattern nor the mention.
        cli.sender.post_message("general", &format!("undone in the {run} run, please, kindly")).await?.success()?;
        post_and_wait(&cli, &format!("Done in the {run} run"), answers, &serving).await?;
        post_and_wait(&cli, &format!("please report the {run} run, @sender"), answers, &serving).await?;
        post_and_wait(&cli, &format!("kindly report the {run} run, @reader"), answers, &serving).await?;
        stop(&cli, &serving).await?;
    }
    // The second run has found the triggers of the first, and each message fired once.
    let triggers = cli.workspace.get("/v1/triggers").await?.success()?;
    let count = |list: &Value| list.as_array().map_or(0, Vec::len);
    assert_eq!(count(&triggers), 3, "{triggers}");
    let events = cli.workspace.get("/v1/workspace/events").await?.success()?;
    let invoked = events["events"].as_array().into_iter().flatten().filter(|event| event["type"] == "action.invoked");
    assert_eq!(invoked.count(), 6, "{events}");
    Ok(())
}

#[tokio::test]
async fn messages_fire_and_are_sent_with_the_published_broker() -> Result<()> {
    messages_fire_and_are_sent(CommandLine::with_published_broker("fleet-published").await?, Answers::InChannel).await
}

#[tokio::test]
async fn messages_fire_and_are_sent_with_our_broker() -> Result<()> {
    messages_fire_and_are_sent(CommandLine::new("fleet-ours").await?, Answers::InThread).await
}
