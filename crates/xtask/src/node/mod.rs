//! `cargo xtask node`: a broker on this machine at the engine of `dev`, with three demo agents.

mod demo;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use relay_stack::binaries;
use relay_stack::node::{BrokerSpec, NodeBroker};

use crate::cargo;
use crate::dev::RunningEngine;
use crate::stop_requests::StopRequests;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// State folder of the `cargo xtask dev` whose engine is used. The broker keeps its own state below it.
    #[arg(long, default_value = ".relay")]
    state_dir: PathBuf,
    /// Starts the broker without agents.
    #[arg(long)]
    no_demo: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let engine = RunningEngine::find(&args.state_dir)?;
    let bin_dir = cargo::built_node()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(args, &engine, &bin_dir))
}

async fn serve(args: &Args, engine: &RunningEngine, bin_dir: &Path) -> Result<()> {
    let mut stop = StopRequests::listen()?;
    let folder = args.state_dir.canonicalize()?.join("node");
    let gateway = engine.gateways.first().context("no gateway")?;
    let spec = BrokerSpec {
        program: binaries::find(bin_dir, "agent-relay-broker")?,
        engine: gateway.clone(),
        workspace_key: engine.workspace_key.clone(),
        name: "demo-node".to_owned(),
        folder: folder.clone(),
        persists: true,
        args: Vec::new(),
        env: Vec::new(),
    };
    let mut broker = tokio::select! {
        broker = NodeBroker::start(&spec) => broker?,
        () = stop.next() => return Ok(()),
    };
    broker.wait_connected().await?;
    println!("The broker is up (pid {}), connected to {gateway}", broker.pid());
    println!("  URL and key of its API: {}/.agentworkforce/relay/connection.json", folder.display());
    println!("  log: {}/broker.log\n", folder.display());

    let shown = async {
        if !args.no_demo
            && let Err(error) = demo::run(&mut broker, engine, &bin_dir.join("fake-agent")).await
        {
            eprintln!("the demo failed: {error:#}\n(the broker stays up)\n{}", broker.log_tail(20));
        }
        println!("\nRunning. Ctrl-C stops the broker and its agents.");
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = shown => {}
        () = stop.next() => {}
    }
    println!("\nstopping");
    let status = broker.terminate().await?;
    println!("the broker has ended with {status}");
    Ok(())
}
