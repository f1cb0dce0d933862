//! `cargo xtask dev`: the whole engine on this machine, kept alive, with a demo.

mod backends;
mod cluster;
mod demo;
mod dev_file;
mod supervise;
mod workspace;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cargo;
use crate::stop_requests::StopRequests;
use cluster::Cluster;
use dev_file::DevFile;

pub(crate) use dev_file::RunningEngine;
pub(crate) use workspace::register_or_rotate;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of gateways to start.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=32))]
    gateways: u16,
    /// Port of the first gateway; the others get the next ones.
    #[arg(long, default_value_t = 8787)]
    port: u16,
    /// Folder that keeps data, logs and dev.json between runs.
    #[arg(long, default_value = ".relay")]
    state_dir: PathBuf,
    /// Starts the engine without showing it at work.
    #[arg(long)]
    no_demo: bool,
    /// Refuses tenants' URLs that lead to this machine, as in production.
    #[arg(long)]
    strict: bool,
    /// Builds with optimisation; slow to compile.
    #[arg(long)]
    release: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let bin_dir = cargo::built_engine(args.release)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(args, &bin_dir))
}

async fn serve(args: Args, bin_dir: &Path) -> Result<()> {
    let mut stop = StopRequests::listen()?;
    let started = Instant::now();
    std::fs::create_dir_all(&args.state_dir)?;
    let state_dir = args.state_dir.canonicalize()?;
    let _lock = lock(&state_dir)?;
    let dev_file = DevFile::new(&state_dir);
    // Before the start, so that until the engine is ready no reader finds the addresses of an earlier run.
    dev_file.write_stopped()?;

    // Dropping a half-started cluster ends its children.
    let cluster = tokio::select! {
        cluster = Cluster::start(&args, &state_dir, bin_dir) => Arc::new(cluster?),
        () = stop.next() => return Ok(()),
    };
    let workspace_key = workspace::kept_or_new(&cluster, dev_file.workspace_key()).await?;
    dev_file.write(&cluster, &workspace_key)?;
    let mut supervised = supervise::keep_alive(&cluster, &dev_file, &workspace_key);
    announce(&cluster, &dev_file, started);

    let shown = async {
        if !args.no_demo
            && let Err(error) = demo::run(&cluster, &workspace_key).await
        {
            eprintln!("the demo failed: {error:#}\n(the engine stays up; logs are in {})", cluster.logs().display());
        }
        println!("\nRunning. Ctrl-C stops everything; the data stays.");
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = shown => {}
        () = stop.next() => {}
    }

    println!("\nstopping (Ctrl-C again ends it at once)");
    // First; otherwise the watchers would restart processes that are being stopped.
    supervised.shutdown().await;
    tokio::select! {
        () = cluster.stop() => {}
        again = StopRequests::again() => {
            again?;
            eprintln!("killing what is left");
        }
    }
    dev_file.write_stopped()
}

/// One engine for each state folder: two would fight over the data.
fn lock(state_dir: &Path) -> Result<File> {
    let path = state_dir.join("lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    if file.try_lock().is_err() {
        bail!("another `cargo xtask dev` runs in {}; use --state-dir and --port for a second one", state_dir.display());
    }
    Ok(file)
}

fn announce(cluster: &Cluster, dev_file: &DevFile, started: Instant) {
    println!("\nThe engine is up after {:.1} s:", started.elapsed().as_secs_f64());
    for gateway in cluster.gateways() {
        println!("  {:<10} {}   metrics {}", gateway.name(), gateway.url(), gateway.metrics_url());
    }
    println!("  {:<10} metrics {}", "worker", cluster.worker().metrics_url());
    println!("  workspace key, database and NATS URLs: {}", dev_file.path().display());
    println!("  logs: {}\n", cluster.logs().display());
}
