//! The broker's own stdout and stderr, which drivers may leave unread.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::node::BrokerSpec;
use relay_testkit::{shared, wait};

use crate::scene::SOON;

#[tokio::test]
async fn an_unread_stderr_stops_nothing() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let gateway = shared().await.any_gateway();
    let workspace = Api::create_workspace(gateway, "unread").await?;
    let spec = BrokerSpec::new(gateway, workspace.token(), "unread", folder.path())?;
    let (unread, full) = std::io::pipe()?;
    let mut filler = Command::new("yes").stdout(full.try_clone()?).spawn()?;
    let mut command = Command::new(&spec.program);
    command.args(["init", "--instance-name", "unread", "--persist"]).current_dir(folder.path());
    command.env("RELAY_BASE_URL", gateway).env("RELAY_WORKSPACE_KEY", workspace.token());
    command.env("HOME", folder.path()).env("XDG_DATA_HOME", folder.path()).env("RELAY_BROKER_API_KEY", "br_unread");
    command.env("RUST_LOG", "trace").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(full);
    let mut broker = command.spawn()?;
    let stdout = broker.stdout.take().context("stdout")?;
    let line = tokio::task::spawn_blocking(move || BufReader::new(stdout).lines().next().context("no line"));
    let line = tokio::time::timeout(SOON, line).await????;
    let api = Api::anonymous(line.rsplit_once(' ').context("a URL")?.1);
    let ready = wait::until_ok("the API to be ready", SOON, || async {
        let session = api.call("GET".parse()?, "/api/session", None, &[("x-api-key", "br_unread")]).await?;
        ensure!(session.status == 200, "{} {}", session.status, session.body);
        Ok(())
    });
    let ready = ready.await;
    let pid = i32::try_from(broker.id())?;
    ensure!(Command::new("kill").arg(pid.to_string()).status()?.success());
    let ended = wait::until_ok("the broker to end", Duration::from_secs(10), || {
        let status = broker.try_wait();
        async move { status?.context("it runs") }
    });
    let ended = ended.await;
    // Only after a failure: otherwise it has ended.
    let _ = broker.kill();
    filler.kill()?;
    filler.wait()?;
    drop(unread);
    ready?;
    assert_eq!(ended?.code(), Some(0));
    Ok(())
}
