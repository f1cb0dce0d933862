//! The life of the broker: lock, listen, join the engine, serve, stop. Main types: [`LocalState`], [`ApiServer`] and
//! [`Operation`], which [`run`] creates in this order.

mod api_server;
mod joining;
mod local_state;
mod operation;
mod workspaces;

use std::env;

use anyhow::{Context as _, Result, bail};
use relay_runtime::{
    metrics,
    shutdown::Shutdown,
    telemetry::{self, FullStderr},
};
use relay_tasks::TaskSet;

use self::{api_server::ApiServer, joining::join_engine, local_state::LocalState, operation::Operation};
use crate::{cli::Init, clock, linux, metric_help, state::StateDirectory};

/// Runs the broker until it is stopped.
pub(crate) async fn run(settings: Init) -> Result<()> {
    // Sets the origin from which timestamps and uptime count.
    clock::now();
    let settings = settings.checked()?;
    if env::var_os("AGENT_RELAY_DISABLE_RELAYCAST").is_some() {
        bail!("AGENT_RELAY_DISABLE_RELAYCAST is set, and this broker does not work without an engine");
    }
    let _telemetry = telemetry::init_with_format("agent-relay-broker", settings.log_format, FullStderr::Drop)?;
    let recorder = metrics::install()?;
    metric_help::describe_all();
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // Environment and memory hold keys, and agents run as the same user.
    if let Err(error) = linux::forbid_tracing() {
        tracing::warn!(%error, "other processes of this user may read the broker's memory");
    }
    let shutdown = Shutdown::on_signals().context("listen to signals")?;
    let stop = shutdown.token();
    let tasks = TaskSet::new(stop.clone());

    let working_directory = env::current_dir().context("find the working directory")?;
    // Locked before anything in it is read: two brokers of one directory would end each other's agents as leftovers.
    let directory = StateDirectory::open(settings.state_dir.as_deref(), settings.persist, &working_directory)?;
    let (state, ledger_task) = LocalState::open(&settings, working_directory, &directory).await?;
    let server = ApiServer::start(&settings, directory, &tasks, recorder, stop.clone()).await?;
    // Its handle is not kept, so that the stop does not abort it: agents that end still wait for their outcomes to be
    // written.
    tasks.spawn("ledger", ledger_task.run());
    let joined = join_engine(&settings, &state, &server.directory, &stop).await?;
    // Stopped meanwhile. No agent runs yet, and dropping the server removes the connection file.
    let Some((engine, identities)) = joined else { return Ok(tasks.check()?) };
    let operation = Operation::start(&settings, state, &server, engine, identities, &tasks);

    tokio::select! {
        () = stop.cancelled() => {}
        () = server.api.inner.lease.expired() => tracing::info!("the owner has not renewed its lease, stopping"),
    }
    // From here on tasks are expected to end.
    stop.cancel();
    // The API ends last, so that subscribers get the events about the ends of the agents.
    operation.stop().await;
    server.stop().await;
    tracing::info!("broker stopped");
    Ok(tasks.check()?)
}
