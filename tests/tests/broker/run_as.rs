//! Agents of a broker that root has started run as another user: `--run-as`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use relay_testkit::node::{BrokerSpec, FakeAgent};
use relay_testkit::process::{Process, Spec};
use relay_testkit::{binaries, shared, wait};
use serde_json::json;

use crate::scene::{SOON, Scene};

/// User without rights on every Linux machine.
const USER: &str = "nobody";
pub(crate) const UID: u32 = 65_534;

pub(crate) fn is_root() -> Result<bool> {
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}

/// A copy of a program where every user can execute it.
pub(crate) fn install(name: &str, folder: &Path, as_name: &str) -> Result<()> {
    let program = binaries::find(&binaries::directory()?, name)?;
    fs::copy(program, folder.join(as_name))?;
    Ok(fs::set_permissions(folder.join(as_name), fs::Permissions::from_mode(0o755))?)
}

#[tokio::test]
async fn agents_run_as_another_user_and_confirm_messages() -> Result<()> {
    if !is_root()? {
        return refused_start(USER, "only a broker that root has started").await;
    }
    let programs = tempfile::tempdir()?;
    fs::set_permissions(programs.path(), fs::Permissions::from_mode(0o755))?;
    install("fake-agent", programs.path(), "confirmer")?;
    let table = programs.path().join("harnesses.toml");
    let entry = "[confirmer]\nmatch = [\"confirmer\"]\nmcp = \"claude\"\ntool_prefix = \"x.\"\nprompt = [\">\"]\n";
    fs::write(&table, entry)?;
    let home = programs.path().join("home");
    fs::create_dir(&home)?;
    chown(&home, Some(UID), None)?;
    let args = ["--run-as".to_owned(), USER.to_owned(), "--harnesses".to_owned(), table.display().to_string()];
    let scene = Scene::with_args("run-as", &args).await?;

    // What a program finds: its user, its home, its terminal, and no way into the state of the broker.
    let state = scene.broker.folder().join(".agentworkforce/relay/connection.json");
    let script = format!(
        "(id -un; id -gn; id -G; echo $HOME $USER; echo x > $(tty) && echo terminal; cat {} || echo closed) \
         > facts.tmp 2>/dev/null; mv facts.tmp facts; cat",
        state.display()
    );
    let body = json!({ "name": "shell", "cli": "sh", "args": ["-c", script], "cwd": home });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    ensure!(spawned.status == 200, "{}", spawned.body);
    let facts = wait::until_ok("the facts", SOON, || async { fs::read_to_string(home.join("facts")) }).await?;
    let lines: Vec<&str> = facts.lines().collect();
    ensure!(lines.len() == 6 && lines[0] == USER && lines[1] == "nogroup" && lines[2] == "65534", "{facts}");
    ensure!(lines[3].ends_with(USER) && lines[4..] == ["terminal", "closed"], "{facts}");

    // An ack file of that user counts; the broker's own helper writes it.
    let log = home.join("confirmer.log");
    let agent = FakeAgent::new("mute", log, &["--confirm", "file"]);
    let body = json!({ "cli": programs.path().join("confirmer"), "cwd": home });
    let spawned = scene.broker.spawn(&agent, "confirmer", body).await?;
    ensure!(spawned.status == 200, "{}", spawned.body);
    scene.sender.dm("confirmer", "read this").await?.success()?;
    let verdict = wait::until_ok("the verdict", SOON, || async {
        let verdicts = scene.broker.events("confirmer", "delivery_verified").await?;
        verdicts.first().cloned().context("no verdict")
    })
    .await
    .with_context(|| scene.broker.log_tail(30))?;
    assert_eq!((&verdict["verification"], &verdict["level"]), (&json!("file"), &json!("L2")), "{verdict}");
    let folder = fs::metadata(home.join(".agent-relay/confirmer/acks"))?;
    assert_eq!((folder.uid(), folder.permissions().mode() & 0o777), (UID, 0o700));

    // A folder that the user may not enter starts nothing; neither does a link lead the broker out of the project.
    let closed = programs.path().join("closed");
    fs::create_dir(&closed)?;
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700))?;
    let body = json!({ "name": "outside", "cli": "sh", "cwd": closed });
    let refused = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("spawn_failed")), "{}", refused.body);
    let trap = home.join("trap");
    fs::create_dir(&trap)?;
    chown(&trap, Some(UID), None)?;
    std::os::unix::fs::symlink(&closed, trap.join(".agent-relay"))?;
    let body = json!({ "name": "trapped", "cli": "cat", "cwd": trap });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    assert_eq!(fs::read_dir(&closed)?.count(), 0, "the broker has followed a link with root's rights");

    let pids = agent.messages().into_iter().map(|(pid, _)| pid).collect::<Vec<_>>();
    scene.broker.terminate().await?;
    ensure!(!pids.is_empty() && pids.iter().all(|pid| !crate::scene::is_running(*pid)), "{pids:?} run on");
    refused_start("no-such-user", "there is no user no-such-user").await
}

/// The broker does not start with this user, and its last line says why.
async fn refused_start(user: &str, reason: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = shared().await.any_gateway();
    let mut spec =
        Spec::new("refused", BrokerSpec::new(engine, "", "", folder.path())?.program, folder.path().join("log"));
    spec.args = ["init", "--persist", "--run-as", user].map(str::to_owned).to_vec();
    spec.cwd = Some(folder.path().to_owned());
    let broker = Process::start(spec)?;
    let status = wait::until_ok("its end", SOON, || async { broker.exit_status().context("it runs") }).await?;
    ensure!(status.code() == Some(1) && broker.log_tail(1).contains(reason), "{status} {}", broker.log_tail(5));
    ensure!(!folder.path().join(".agentworkforce/relay/connection.json").exists(), "the connection file is left");
    Ok(())
}
