//! The stack harness over stand-ins for the engine's binaries, with the real servers.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use relay_testkit::client::Api;
use relay_testkit::stack::Stack;
use relay_testkit::wait;

const SOON: Duration = Duration::from_secs(20);

fn fake_binaries() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/engine.py");
    for name in ["relay-gateway", "relay-worker", "relayctl"] {
        let copy = dir.path().join(name);
        fs::copy(&script, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
    }
    dir
}

#[tokio::test]
async fn a_stack_runs_restarts_in_place_and_leaves_nothing_behind() {
    let binaries = fake_binaries();
    let stack = Stack::builder()
        .bin_dir(binaries.path())
        .env("FAKE_ANSWER", "given")
        .through_proxies(true)
        .start()
        .await
        .unwrap();
    let gateway = stack.gateway(1);
    let answer = Api::anonymous(gateway.url()).get("/env").await.unwrap();
    assert_eq!((answer.status, answer.body), (200, "given".into()));

    let limits = fs::read_to_string(format!("/proc/{}/limits", gateway.pid())).unwrap();
    let open_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = open_files.split_whitespace().collect();
    assert_eq!(words[3], words[4], "soft and hard: {open_files}");

    let (pid, url) = (gateway.pid(), gateway.url().to_owned());
    gateway.kill9();
    assert!(!gateway.is_running());
    gateway.restart().await.unwrap();
    assert_ne!(gateway.pid(), pid);
    assert_eq!(gateway.url(), url);

    stack.postgres_proxy().cut();
    wait::until("the gateway to miss its database", SOON, || async { !gateway.is_ready().await }).await;
    stack.postgres_proxy().restore();
    gateway.wait_ready().await.unwrap();

    gateway.terminate().await.unwrap();
    assert!(!gateway.is_running());
    let pids = [stack.postgres().pid(), stack.nats().pid(), stack.gateway(0).pid(), stack.worker().pid()];
    let dir = stack.state_dir().to_owned();
    drop(stack);
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
    }
    assert!(!dir.exists());
}

#[tokio::test]
async fn a_process_that_dies_at_startup_is_reported_with_its_last_output() {
    let binaries = fake_binaries();
    let started = Stack::builder().bin_dir(binaries.path()).gateways(1).env("FAKE_DIES", "relay-worker").start().await;
    let error = started.unwrap_err().to_string();
    assert!(error.contains("worker ended") && error.contains("cannot find my socks"), "{error}");
}

#[tokio::test]
async fn a_missing_binary_is_named() {
    let empty = tempfile::tempdir().unwrap();
    let error = Stack::builder().bin_dir(empty.path()).start().await.unwrap_err().to_string();
    assert!(error.contains("relayctl"), "{error}");
}
