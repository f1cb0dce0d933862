//! Agents with an entry in the harness table: confirmations, failures, activity, Enters, results, and figures.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use relay_testkit::client::Api;
use relay_testkit::node::FakeAgent;
use relay_testkit::{binaries, shared, wait};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::event_log::EventLog;
use crate::scene::{SOON, Scene};

/// Entries for programs that fake agents or scripts play. `strict` and `working` fail a message that shows no echo.
const HARNESSES: &str = r#"
[claude]
match = ["claude"]
session_new_args = ["--session-id", "{session}"]
session_resume_args = ["--resume", "{session}"]
mcp = "claude"
tool_prefix = "mcp__agent-relay__"
prompt = [">"]

[strict]
match = ["strict"]
prompt = [">"]
verification = { echo = "reliable", primary = "echo", required = { echo = true, file = false, mcp = false, api = false }, max_reinjections = 0, silent = "failed" }

[working]
match = ["working"]
prompt = [">"]
ready = { prompt = [">"] }
activity = ["Tool:"]
verification = { echo = "reliable", primary = "echo", required = { echo = true, file = false, mcp = false, api = false }, max_reinjections = 0, silent = "failed" }

[entering]
match = ["entering"]
ready = { prompt = [">"] }
auto_enter = true
enter_gap_ms = 1500
"#;

/// A scene whose broker knows the entries, and a folder with programs of their names.
pub(crate) struct Harnesses {
    pub(crate) scene: Scene,
    programs: TempDir,
}

impl Harnesses {
    pub(crate) async fn new(name: &str) -> Result<Self> {
        Self::at(name, shared().await.any_gateway()).await
    }

    /// A scene whose broker uses the engine at this URL.
    pub(crate) async fn at(name: &str, engine: &str) -> Result<Self> {
        let programs = tempfile::tempdir()?;
        let table = programs.path().join("harnesses.toml");
        fs::write(&table, HARNESSES)?;
        let fake_agent = binaries::find(&binaries::directory()?, "fake-agent")?;
        for program in ["claude", "strict"] {
            std::os::unix::fs::symlink(&fake_agent, programs.path().join(program))?;
        }
        for program in ["working", "entering"] {
            std::os::unix::fs::symlink("/bin/sh", programs.path().join(program))?;
        }
        let args = ["--harnesses".to_owned(), table.display().to_string()];
        Ok(Self { scene: Scene::in_folder(name, engine, &args, tempfile::tempdir()?).await?, programs })
    }

    /// The scene, and the folder that the programs run from.
    pub(crate) fn into_parts(self) -> (Scene, TempDir) {
        (self.scene, self.programs)
    }

    /// Starts a program under its own name.
    pub(crate) async fn spawn(
        &self,
        program: &str,
        name: &str,
        show: &str,
        more: &[&str],
        fields: Value,
    ) -> Result<FakeAgent> {
        let path: PathBuf = self.programs.path().join(program);
        let mut body = json!({ "cli": path });
        if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
            body.extend(fields);
        }
        self.scene.spawn_with(name, show, more, body).await
    }

    /// Starts a shell script under the name of a program, and returns its process id.
    pub(crate) async fn spawn_script(&self, program: &str, name: &str, script: &str) -> Result<Value> {
        let body = json!({ "name": name, "cli": self.programs.path().join(program), "args": ["-c", script] });
        let spawned = self.scene.broker.call("POST", "/api/spawn", Some(body)).await?;
        ensure!(spawned.is_success(), "{} {}", spawned.status, spawned.body);
        Ok(spawned.body["pid"].clone())
    }
}

async fn verdict(scene: &Scene, name: &str) -> Result<Value> {
    wait::until_ok("the verdict", SOON, || async {
        let verdicts = scene.broker.events(name, "delivery_verified").await?;
        verdicts.first().cloned().context("no verdict")
    })
    .await
    .with_context(|| format!("{}\n{}", scene.broker.log_tail(30), scene.agent_log(name)))
}

#[tokio::test]
async fn an_agent_confirms_by_file_and_by_its_mcp_server() -> Result<()> {
    let harnesses = Harnesses::new("confirming").await?;
    let scene = &harnesses.scene;
    for method in ["file", "mcp"] {
        harnesses.spawn("claude", method, "mute", &["--confirm", method], json!({})).await?;
        scene.sender.dm(method, "read this").await?.success()?;
        let verdict = verdict(scene, method).await?;
        let word = format!("{method}_acked");
        assert_eq!((&verdict["verification"], &verdict["level"]), (&json!(method), &json!("L2")), "{verdict}");
        assert_eq!((&verdict["confidence"], &verdict["verified"]), (&json!(word), &json!(true)));
    }
    let figures = scene.broker.call("GET", "/api/verification", None).await?.body;
    let claude = figures["programs"].as_array().and_then(|list| list.first()).context("figures")?;
    assert_eq!((&claude["harness"], &claude["deliveries"]), (&json!("claude"), &json!(2)), "{figures}");
    assert_eq!(claude["verified_by_method_percent"], json!({ "file": 50.0, "mcp": 50.0 }));
    let one = scene.broker.call("GET", "/api/verification?agent=mcp", None).await?.body;
    assert_eq!((&one["figures"]["deliveries"], &one["harness"]), (&json!(1), &json!("claude")), "{one}");
    Ok(())
}

#[tokio::test]
async fn a_message_without_a_sign_fails_and_can_be_typed_again() -> Result<()> {
    let harnesses = Harnesses::new("failing").await?;
    let scene = &harnesses.scene;
    let agent = harnesses.spawn("strict", "deaf", "mute", &[], json!({})).await?;
    scene.sender.dm("deaf", "message-1").await?.success()?;
    let letters = wait::until_ok("a dead letter", SOON, || async {
        let letters = scene.broker.call("GET", "/api/dead-letters", None).await?.body;
        letters["dead_letters"].as_array().filter(|list| list.len() == 1).cloned().context("no letter")
    });
    let letter = letters.await?.remove(0);
    assert_eq!((&letter["reason"], &letter["body"]), (&json!("verification_failed"), &json!("message-1")), "{letter}");
    scene.wait_unverified("deaf", 1).await?;

    let id = letter["delivery_id"].as_str().context("an id")?;
    let path = format!("/api/dead-letters/{id}/redeliver");
    // Of several calls at once one types it.
    let mut answers = try_join_all((0..8).map(|_| scene.broker.call("POST", &path, None))).await?;
    answers.sort_by_key(|answer| answer.status);
    let again = answers.remove(0);
    assert_eq!((again.status, &again.body["name"]), (200, &json!("deaf")), "{}", again.body);
    for answer in answers {
        assert_eq!((answer.status, &answer.body["code"]), (404, &json!("delivery_not_found")), "{}", answer.body);
    }
    wait::until_ok("the second copy", SOON, || async {
        ensure!(agent.bodies() == ["message-1", "message-1"], "{:?}", agent.bodies());
        anyhow::Ok(())
    })
    .await?;
    let gone = scene.broker.call("POST", &path, None).await?;
    assert_eq!((gone.status, &gone.body["code"]), (404, &json!("delivery_not_found")));
    Ok(())
}

/// It notes its token, takes two messages without a sign, and asks for its end. Whatever is typed later is noted.
const LEAVING: &str = r#"
stty -echo; printf %s "$AGENT_RELAY_ACK_TOKEN" > token; printf '> '
read -r line; read -r line; printf '\n/exit\n'; while read -r line; do echo "$line" >> typed; done
"#;

#[tokio::test]
async fn a_failed_message_stays_failed_when_its_agent_has_asked_for_its_end() -> Result<()> {
    let harnesses = Harnesses::new("redelivery").await?;
    let scene = &harnesses.scene;
    let events = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    harnesses.spawn_script("working", "leaving", LEAVING).await?;
    scene.sender.dm("leaving", "message-1").await?.success()?;
    let letters = async || {
        let letters = scene.broker.call("GET", "/api/dead-letters", None).await?.body["dead_letters"].take();
        anyhow::Ok(letters.as_array().context("a list")?.clone())
    };
    let letter =
        wait::until_ok("a dead letter", SOON, || async { letters().await?.pop().context("no letter") }).await?;
    let second = scene.sender.dm("leaving", "message-2").await?.success()?;
    // Output is published before anything that comes later is handled.
    wait::until_ok("the request", SOON, || async {
        ensure!(events.output_bytes() >= "> \r\n/exit\r\n".len(), "no output");
        anyhow::Ok(())
    })
    .await?;
    let id = letter["delivery_id"].as_str().context("an id")?;
    let refused = scene.broker.call("POST", &format!("/api/dead-letters/{id}/redeliver"), None).await?;
    let answer = (refused.status, &refused.body["code"]);
    assert_eq!(answer, (503, &json!("worker_disappeared")), "{}", refused.body);
    assert_eq!(letters().await?, [letter], "the letter was lost");

    // Its ack gives the second message its verdict, which the end waits for.
    let token = fs::read_to_string(scene.broker.folder().join("token"))?;
    let ack = json!({ "event_id": second["message"]["id"] });
    let api = Api::anonymous(scene.broker.url());
    api.call("POST".parse()?, "/api/delivery-ack", Some(ack), &[("x-agent-ack-token", &token)]).await?.success()?;
    wait::until_ok("the end", SOON, || async {
        ensure!(scene.broker.events("leaving", "agent_exited").await?.len() == 1, "it runs");
        anyhow::Ok(())
    })
    .await?;
    assert!(!scene.broker.folder().join("typed").exists(), "the failed message was typed");
    Ok(())
}

#[tokio::test]
async fn an_enter_is_repeated_but_not_after_an_agent_has_asked_for_its_end() -> Result<()> {
    let harnesses = Harnesses::new("enters").await?;
    let scene = &harnesses.scene;
    // The text of a message is followed by Enter after 1500 ms, so the request comes between both.
    for (name, shown) in [("staying", ""), ("leaving", "\\r\\n/exit\\r\\n")] {
        let script = format!(
            "stty raw -echo; printf '> '; dd bs=1 count=1 of=/dev/null 2> /dev/null; printf '{shown}'; exec cat > keys-{name}"
        );
        harnesses.spawn_script("entering", name, &script).await?;
        scene.sender.dm(name, "hello").await?.success()?;
    }
    let enters = |name: &str| {
        let keys = fs::read_to_string(scene.broker.folder().join(format!("keys-{name}")))?;
        anyhow::Ok(keys.matches('\r').count())
    };
    wait::until_ok("the repeated Enter and the end", SOON, || async {
        ensure!(enters("staying")? == 2, "it has {} Enters", enters("staying")?);
        ensure!(scene.broker.events("leaving", "agent_exited").await?.len() == 1, "it runs");
        anyhow::Ok(())
    })
    .await?;
    assert_eq!(scene.broker.events("leaving", "delivery_injected").await?.len(), 1);
    assert_eq!(enters("leaving")?, 1);
    Ok(())
}

/// It uses a tool for each message, once the file with the message's number is there.
const WORKING: &str = r#"
number=1; printf '> '
while read -r line; do
    while [ ! -e "use-$number" ]; do sleep 0.05; done
    printf 'Tool: read\n> '; number=$((number + 1))
done
"#;

#[tokio::test]
async fn work_on_a_message_is_shown_to_subscribers_and_not_kept() -> Result<()> {
    let harnesses = Harnesses::new("activity").await?;
    let scene = &harnesses.scene;
    let events = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    harnesses.spawn_script("working", "busy", WORKING).await?;
    let mut messages = Vec::new();
    // The pattern in a message that quotes it proves nothing for that message.
    for (body, active_count) in [("message-1", 1), ("say Tool: twice", 1), ("message-3", 2)] {
        let posted = scene.sender.dm("busy", body).await?.success()?;
        messages.push(posted["message"]["id"].clone());
        let number = messages.len();
        wait::until_ok("the verdict", SOON, || async {
            let verdicts = scene.broker.events("busy", "delivery_verified").await?;
            ensure!(verdicts.len() == number, "{verdicts:?}");
            anyhow::Ok(())
        })
        .await?;
        assert!(events.events("busy", "delivery_active").len() < number, "it has not begun to work on {body}");
        fs::write(scene.broker.folder().join(format!("use-{number}")), "")?;
        wait::until_ok("the activity", SOON, || async {
            let active = events.events("busy", "delivery_active");
            ensure!(active.len() == active_count, "{active:?}");
            anyhow::Ok(())
        })
        .await?;
    }
    let active = events.events("busy", "delivery_active");
    for (event, message) in active.iter().zip([&messages[0], &messages[2]]) {
        let named = (&event["event_id"], &event["pattern"], &event["attempt"]);
        assert_eq!(named, (message, &json!("Tool:"), &json!(1)), "{event}");
        let proven = (&event["level"], &event["confidence"], &event["method"]);
        assert_eq!(proven, (&json!("L3"), &json!("active"), &json!("activity")), "{event}");
        assert!(event["delivery_id"].is_string() && event["timestamp"].is_u64() && event.get("seq").is_none());
    }
    let raised = scene.broker.events("busy", "delivery_upgraded").await?;
    let raised: Vec<_> = raised.iter().map(|event| (&event["event_id"], &event["level"])).collect();
    assert_eq!(raised, [(&messages[0], &json!("L3")), (&messages[2], &json!("L3"))]);
    assert!(scene.broker.events("busy", "delivery_active").await?.is_empty(), "it is in the replay");
    events.check_complete()
}

#[tokio::test]
async fn a_result_must_fit_its_schema() -> Result<()> {
    let harnesses = Harnesses::new("result").await?;
    let scene = &harnesses.scene;
    let wrong = json!({ "name": "x", "cli": "cat", "agentResultSchema": { "type": 5 } });
    let refused = scene.broker.call("POST", "/api/spawn", Some(wrong)).await?;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);

    let schema = json!({ "type": "object", "properties": { "score": { "type": "number" } }, "required": ["score"] });
    let environment = scene.broker.folder().join("environment");
    let script = format!("env > {}.tmp; mv {0}.tmp {0}; cat", environment.display());
    let body = json!({ "name": "judge", "cli": "sh", "args": ["-c", script], "agentResultSchema": schema });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!(spawned.status, 200, "{}", spawned.body);
    let variables = wait::until_ok("the environment", SOON, || async { fs::read_to_string(&environment) }).await?;
    let variable = |name: &str| {
        let line = variables.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.map(str::to_owned).with_context(|| format!("no {name}"))
    };
    let token = variable("AGENT_RELAY_RESULT_TOKEN")?;
    assert_eq!(serde_json::from_str::<Value>(&variable("AGENT_RELAY_RESULT_SCHEMA")?)?, schema);

    let submit = async |token: &str, body: Value| {
        let api = Api::anonymous(scene.broker.url());
        api.call("POST".parse()?, "/api/agent-result", Some(body), &[("x-agent-result-token", token)]).await
    };
    let refused = submit("arr_0", json!({ "data": { "score": 1 } })).await?;
    assert_eq!((refused.status, &refused.body["success"]), (401, &json!(false)));
    let unfit = submit(&token, json!({ "data": { "score": "high" } })).await?;
    assert_eq!((unfit.status, &unfit.body["code"]), (400, &json!("schema_mismatch")), "{}", unfit.body);
    let taken = submit(&token, json!({ "data": { "score": 7 }, "final": false })).await?;
    assert_eq!((taken.status, &taken.body["name"]), (200, &json!("judge")), "{}", taken.body);
    let results = scene.broker.events("judge", "agent_result").await?;
    assert_eq!(results.len(), 1);
    assert_eq!((&results[0]["result_id"], &results[0]["final"]), (&taken.body["result_id"], &json!(false)));
    scene.broker.call("DELETE", "/api/spawned/judge", None).await?;
    assert_eq!(submit(&token, json!({ "data": { "score": 8 } })).await?.status, 401, "the token ends with its agent");
    Ok(())
}
