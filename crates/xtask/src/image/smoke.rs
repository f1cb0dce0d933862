//! `cargo xtask smoke`: the pods of the Helm chart, run by podman from the image, with Postgres and NATS on the host. A
//! message goes through them, and the gateway drains.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_stack::client::Api;
use relay_stack::ports::Port;
use relay_stack::servers::{Nats, Postgres};
use relay_stack::wait;

use super::{Storage, build, gather, probe, storage};
use crate::cargo;
use crate::python::Packages;
use crate::sbom;

const TAG: &str = "localhost/relay:smoke";
const SOON: Duration = Duration::from_secs(30);

pub(crate) fn run() -> Result<()> {
    // Before the build: see `cargo::bin_dir`.
    let packages = Packages::installed()?;
    check(&packages, &cargo::built_engine(false)?)
}

/// The same with binaries and packages that are there already.
pub(crate) fn check(packages: &Packages, binaries: &Path) -> Result<()> {
    let storage = Storage::new()?;
    bills_of_materials(&storage)?;
    if let Some(reason) = probe::obstacle(&storage)? {
        // Only this is let pass: a machine that cannot run anybody's container.
        gather(&storage, binaries)?;
        println!("the programs run on the files of the image alone");
        println!("!! SMOKE TEST NOT RUN: this machine runs no containers, so more is not known of image and chart.");
        println!("!! {reason}");
        return Ok(());
    }
    println!("this machine runs containers");
    let id = build(&storage, binaries, TAG)?;
    ensure!(id == build(&storage, binaries, TAG)?, "the same binaries made another image the second time");
    println!("image {id}, twice the same, {} MiB", size(&storage)? >> 20);
    let version = storage::run(storage.podman().args([
        "run",
        "--rm",
        "--network",
        "host",
        TAG,
        "/usr/bin/relayctl",
        "--version",
    ]));
    println!("in it: {}", version.context("relayctl does not run in the image")?.trim());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(deliver(&storage, packages))
}

fn bills_of_materials(storage: &Storage) -> Result<()> {
    for (path, bill) in sbom::write(&storage.fresh_dir("sbom")).context("make the bills of materials")? {
        let crates = bill["components"].as_array().map(Vec::as_slice).unwrap_or_default();
        let is_whole = |part: &serde_json::Value| part["licenses"].is_array() && part["hashes"].is_array();
        let name = path.file_name().unwrap_or_default().display();
        ensure!(crates.iter().any(|part| part["name"] == "tokio" && is_whole(part)), "{name} lacks tokio");
        println!("{name} names {} crates", crates.len());
    }
    Ok(())
}

fn size(storage: &Storage) -> Result<u64> {
    let bytes = storage::run(storage.podman().args(["image", "inspect", TAG, "--format", "{{.Size}}"]))?;
    bytes.trim().parse().with_context(|| format!("read the size {bytes:?}"))
}

async fn deliver(storage: &Storage, packages: &Packages) -> Result<()> {
    let state = storage.fresh_dir("servers");
    std::fs::create_dir(&state)?;
    let (database_dir, stream_dir) = (state.join("postgres"), state.join("nats"));
    let (postgres, nats) = tokio::try_join!(Postgres::start(&database_dir), Nats::start(&stream_dir))?;
    let database_url = postgres.create_database("relay").await?;
    let (port, metrics, worker_metrics) = (Port::free()?, Port::free()?, Port::free()?);
    let mut render = packages.python(&["helm/tools/kube_play.py", TAG, &database_url, &nats.url()]);
    render.args([&port, &metrics, &worker_metrics].map(|port| port.number().to_string()));
    let pods = state.join("pods.yaml");
    std::fs::write(&pods, storage::run(&mut render).context("render the chart")?)?;
    storage::run(storage.podman().args(["kube", "play"]).arg(&pods)).context("play the chart's pods")?;

    let outcome = use_it(storage, &port, &worker_metrics).await;
    if outcome.is_err() {
        for name in containers(storage)? {
            let output = storage.podman().args(["logs", "--tail", "20", &name]).output()?;
            eprintln!("{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    outcome
}

async fn use_it(storage: &Storage, port: &Port, worker_metrics: &Port) -> Result<()> {
    let names = containers(storage)?;
    println!("the chart's pods run: {}", names.join(", "));
    let named = |end: &str| names.iter().find(|name| name.ends_with(end)).with_context(|| format!("no …{end}"));
    let (migration, gateway_container, worker_container) = (named("-migrate")?, named("-gateway")?, named("-worker")?);
    ends_well(storage, migration)?;
    println!("the migration has run");
    let gateway = format!("http://{}", port.address());
    let worker = format!("http://{}", worker_metrics.address());
    for (name, base) in [("gateway", &gateway), ("worker", &worker)] {
        wait::until_ok(&format!("the {name} to be ready"), SOON, || async {
            ensure!(Api::anonymous(base).get("/ready").await?.is_success(), "it is not");
            anyhow::Ok(())
        })
        .await?;
    }
    let workspace = Api::create_workspace(&gateway, "smoke").await?;
    let (ada, bob) = (workspace.register_agent("ada").await?, workspace.register_agent("bob").await?);
    let mut socket = workspace.as_agent(&bob).direct_socket().await?;
    workspace.as_agent(&ada).dm("bob", "from a container").await?.success()?;
    let frame = socket.expect("deliver").await?;
    ensure!(frame["seq"] == 1, "the first delivery is {frame}");
    socket.ack("bob", 1).await?;
    wait::until_ok("the ack to be stored", SOON, || async {
        let rows = workspace.as_agent(&bob).get("/v1/deliveries?status=acked").await?.success()?;
        ensure!(rows.as_array().is_some_and(|rows| rows.len() == 1), "{rows}");
        anyhow::Ok(())
    })
    .await?;
    println!("a message was accepted, delivered and acknowledged through the chart's pods");

    // Longer than the 30 s that a drain takes at most, so that a kill by podman cannot hide a drain that hangs.
    storage::run(storage.podman().args(["stop", "--time", "40", gateway_container]))?;
    let code = socket.closed(SOON).await?;
    ensure!(code == Some(1012), "the socket was closed with {code:?}, not as by a drain");
    ends_well(storage, gateway_container)?;
    storage::run(storage.podman().args(["stop", "--time", "40", worker_container]))?;
    ends_well(storage, worker_container)?;
    println!("gateway and worker drained: the socket was closed with 1012, both ended with 0");
    Ok(())
}

/// Waits for a container's end, which must be a good one.
fn ends_well(storage: &Storage, name: &str) -> Result<()> {
    let code = storage::run(storage.podman().args(["wait", name]))?;
    ensure!(code.trim() == "0", "{name} ended with {}", code.trim());
    Ok(())
}

fn containers(storage: &Storage) -> Result<Vec<String>> {
    let names = storage::run(storage.podman().args(["ps", "--all", "--format", "{{.Names}} {{.IsInfra}}"]))?;
    Ok(names.lines().filter_map(|line| line.strip_suffix(" false")).map(str::to_owned).collect())
}
