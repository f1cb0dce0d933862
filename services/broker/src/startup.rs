//! The life of the broker: lock, listen, join the engine, serve, stop.

use std::{
    collections::BTreeMap,
    env,
    io::Write as _,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use relay_pty::{HostSettings, PtyHost};
use relay_runtime::{metrics, shutdown::Shutdown, telemetry};
use relay_tasks::{TaskSet, spawn_isolated};
use relay_verification::Level;
use serde_json::Value;
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agents::{AckWatch, AgentSettings, Agents, ContinuityFolder, MARKER, Services, Spawner, run_receipts, run_reports},
    api::{Api, Broker, Inner, router},
    cli::Init,
    clock,
    engine::{Engine, JoinRequest, join, machine_seed},
    engine_link::{LinkSettings, LinkTask, Manifest},
    events::Hub,
    harness::HarnessTable,
    insight::{CrashLog, VerificationBook},
    invocations::{self, Handlers},
    lease::Lease,
    restore,
    runner::Runners,
    state::{ConnectionFile, LedgerTask, Persistence, Roster, StateDirectory},
};

/// The whole conversation with the engine before the broker is ready.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Agents have so long to end politely when the broker stops; the whole stop takes less than 4 s.
const STOP_GRACE: Duration = Duration::from_millis(1500);
const LEAVE_TIMEOUT: Duration = Duration::from_millis(1500);
/// Receipts that wait to be posted. Further ones are dropped and counted.
const RECEIPTS: usize = 1024;
/// Invocations that wait to be handled. Further ones are left to the engine's time-out.
const INVOCATIONS: usize = 256;

/// Runs the broker until it is stopped.
pub(crate) async fn run(settings: Init) -> Result<()> {
    clock::now();
    if env::var_os("AGENT_RELAY_DISABLE_RELAYCAST").is_some() {
        bail!("AGENT_RELAY_DISABLE_RELAYCAST is set, and this broker does not work without an engine");
    }
    let _telemetry = telemetry::init("agent-relay-broker")?;
    let recorder = metrics::install()?;
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    forbid_tracing();
    let shutdown = Shutdown::on_signals().context("listen to signals")?;
    let stop = shutdown.token();
    let working_directory = env::current_dir().context("find the working directory")?;
    let instance = instance_name(&settings, &working_directory);
    let harnesses = Arc::new(HarnessTable::read(settings.harnesses.as_deref())?);

    let directory = StateDirectory::open(settings.state_dir.as_deref(), settings.persist, &working_directory)?;
    let (roster, previous) = Roster::open(directory.file("state", &instance, "json"))?;
    let (ledger, ledger_task) = LedgerTask::open(directory.file("ledger", &instance, "jsonl"))?;
    let verification = Arc::new(VerificationBook::open(directory.file("verification", &instance, "json"))?);
    let crashes = Arc::new(CrashLog::open(directory.path().join("crash-insights.json"))?);
    let host = PtyHost::new(HostSettings::new(MARKER)).context("prepare for terminals")?;
    restore::end_leftovers(&host, &previous).await?;
    let survivors = match directory.persistence() {
        Persistence::Kept => restore::survivors(previous, settings.resume, &ledger_task, &roster),
        Persistence::Removed => Vec::new(),
    };

    let listener = TcpListener::bind(SocketAddr::new(settings.api_bind, settings.api_port));
    let listener = listener.await.with_context(|| format!("listen on {}:{}", settings.api_bind, settings.api_port))?;
    let address = listener.local_addr().context("read the port")?;
    let url = format!("http://{address}");
    if !settings.api_bind.is_loopback() {
        tracing::warn!(%address, "the API controls every agent and listens beyond this machine");
    }
    let key = settings.api_key.clone().filter(|key| !key.is_empty());
    let key = key.unwrap_or_else(|| format!("br_{}", uuid::Uuid::new_v4().simple()));
    let connection = ConnectionFile::write(&directory, &url, address.port(), &key)?;
    let hub = Hub::new();
    let served = CancellationToken::new();
    let api = Api::new(Inner {
        key,
        url: url.clone(),
        hub: hub.clone(),
        lease: Lease::new(settings.persist),
        metrics: recorder.clone(),
        stop: stop.clone(),
        closing: served.clone(),
        broker: OnceLock::new(),
    });
    let server = axum::serve(listener, router(api.clone())).with_graceful_shutdown(served.clone().cancelled_owned());
    let long_running = TaskSet::new(stop.clone());
    let server = long_running.spawn("api-server", log_failure(server.into_future()));
    announce(&url);
    let tasks = TaskTracker::new();
    let metrics_server = serve_metrics(&settings, recorder, &api, &long_running, served.clone()).await?;
    long_running.spawn("ledger", ledger_task.run());

    let engine_url = engine_url(&settings)?;
    let engine = Engine::new(&engine_url)?;
    let joining = join(&engine, join_request(&settings, &instance, &working_directory, &directory)?);
    let joined = stop.run_until_cancelled(timeout(JOIN_TIMEOUT, joining)).await;
    let Some(joined) = joined else { return Ok(long_running.check()?) };
    let identity = joined.with_context(|| format!("{engine_url} has not answered in time"))??;

    let (node_id, node_name) = (identity.node_id.clone(), identity.node_name.clone());
    let manifest = Manifest::bootstrap(&node_id, &node_name, &settings.spawn, settings.max_agents);
    let (invocation_sender, invocation_inbox) = mpsc::channel(INVOCATIONS);
    let (link, link_task) = LinkTask::new(LinkSettings {
        engine: engine.clone(),
        identity: identity.clone(),
        socket_base: settings.engine_socket_url.clone().filter(|url| !url.is_empty()),
        hub: hub.clone(),
        manifest,
        invocations: invocation_sender,
    });
    let (receipts, receipts_inbox) = mpsc::channel(RECEIPTS);
    let (reports, reports_inbox) = mpsc::channel(RECEIPTS);
    let roster = Arc::new(roster);
    let services = Services {
        host: host.clone(),
        link: link.clone(),
        engine: engine.clone(),
        identity: Arc::new(identity),
        hub: hub.clone(),
        ledger,
        roster: roster.clone(),
        agents: Arc::<Agents>::default(),
        harnesses,
        receipts,
        reports,
        crashes,
        dead_letters: Arc::default(),
        verification: verification.clone(),
        ack_watch: AckWatch::new(),
        counters: Arc::default(),
        tasks: tasks.clone(),
        settings: Arc::new(agent_settings(&settings, working_directory, url, ContinuityFolder::new(directory.path()))),
    };
    let spawner = Spawner::new(services.clone());
    long_running.spawn("engine-link", link_task.run());
    let reports_task = long_running.spawn("reports", run_reports(engine.clone(), reports_inbox));
    let receipts_task = long_running.spawn("receipts", run_receipts(engine, hub, receipts_inbox));
    let book_task = long_running.spawn("verification-file", verification.clone().keep_written());
    let runners = Arc::<Runners>::default();
    let handlers = Handlers { services: services.clone(), spawner: spawner.clone(), runners: runners.clone() };
    let invocations_task = long_running.spawn("invocations", invocations::run(handlers, invocation_inbox));
    let is_new = api.inner.broker.set(Broker { services: services.clone(), spawner: spawner.clone(), runners }).is_ok();
    debug_assert!(is_new, "the broker is set once");
    tracing::info!(node.id = node_id, node.name = node_name, "broker ready");
    let restoring = spawn_isolated("restore", restore::start(spawner, survivors, roster.clone()));

    tokio::select! {
        () = stop.cancelled() => {}
        () = api.inner.lease.expired() => tracing::info!("the owner has not renewed its lease, stopping"),
    }
    // From here on tasks are expected to end.
    stop.cancel();
    restoring.abort();
    invocations_task.abort();
    let running = roster.agents();
    stop_agents(&host, &services).await;
    keep_roster(roster, running).await;
    if timeout(LEAVE_TIMEOUT, link.leave()).await.is_err() {
        tracing::warn!("the engine was not told in time, it will notice");
    }
    receipts_task.abort();
    reports_task.abort();
    book_task.abort();
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || verification.write()).await {
        tracing::warn!(error = format!("{error:#}"), "what was learned is not written down");
    }
    drop(connection);
    served.cancel();
    // Answers that are under way; sockets of readers that are left are cut by the end of the process.
    let _ = timeout(Duration::from_millis(300), server).await;
    if let Some(metrics_server) = metrics_server {
        metrics_server.abort();
    }
    tracing::info!("broker stopped");
    Ok(long_running.check()?)
}

/// Ends all agents together.
async fn stop_agents(host: &PtyHost, services: &Services) {
    let release = services.agents.list().into_iter().map(|agent| async move {
        let reason = Some("shutdown".to_owned());
        // An agent that ends by itself meanwhile is released as well.
        let _ = agent.ask(|reply| crate::agents::AgentCommand::Release { reason, reply }).await;
    });
    let released = futures::future::join_all(release);
    let (ended, _) = tokio::join!(host.shutdown(STOP_GRACE), timeout(Duration::from_millis(2500), released));
    match ended {
        Ok(report) if report.survivors.is_empty() => {}
        Ok(report) => tracing::error!(survivors = ?report.survivors, "processes outlive the broker"),
        Err(error) => tracing::error!(%error, "the agents could not be ended"),
    }
}

/// Writes down who ran, for `--resume`.
async fn keep_roster(roster: Arc<Roster>, running: BTreeMap<String, crate::state::AgentRecord>) {
    let written = tokio::task::spawn_blocking(move || roster.stop(running)).await;
    if let Ok(Err(error)) = written {
        tracing::error!(error = format!("{error:#}"), "the stop is not written down");
    }
}

fn instance_name(settings: &Init, working_directory: &std::path::Path) -> String {
    let given = settings.instance_name.clone().filter(|name| !name.trim().is_empty());
    let base = || working_directory.file_name().map(|name| name.to_string_lossy().into_owned());
    given.or_else(base).unwrap_or_else(|| "broker".to_owned())
}

fn engine_url(settings: &Init) -> Result<String> {
    let given = settings.engine_url.clone().filter(|url| !url.is_empty());
    let url = given.or_else(|| variable("RELAY_BASE_URL"));
    let url = url.context("no engine: set RELAYCAST_BASE_URL or RELAY_BASE_URL")?;
    let parsed = url::Url::parse(&url).with_context(|| format!("{url} is not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        bail!("{url} is not an http or https URL");
    }
    Ok(url)
}

fn join_request(
    settings: &Init,
    instance: &str,
    working_directory: &std::path::Path,
    directory: &StateDirectory,
) -> Result<JoinRequest> {
    let given = settings.workspace_key.clone().filter(|key| !key.is_empty());
    let keys = ["RELAY_WORKSPACE_KEY", "RELAY_API_KEY"];
    let workspace_key = given.or_else(|| keys.into_iter().find_map(variable)).or_else(default_workspace_key);
    Ok(JoinRequest {
        instance: instance.to_owned(),
        workspace_key,
        agent_type: settings.agent_type.clone(),
        channels: settings.channels.iter().map(|name| name.trim_start_matches('#').to_owned()).collect(),
        machine_seed: machine_seed(variable("XDG_DATA_HOME").as_deref(), variable("HOME").as_deref())?,
        working_directory: working_directory.to_owned(),
        takes_over: directory.persistence() == Persistence::Kept,
        node_token: settings.node_token.clone().filter(|token| !token.is_empty()),
        token_file: directory.file("node-token", instance, "json"),
    })
}

/// Key of the default workspace in `RELAY_WORKSPACES_JSON`.
fn default_workspace_key() -> Option<String> {
    let workspaces: Vec<Value> = serde_json::from_str(&variable("RELAY_WORKSPACES_JSON")?).ok()?;
    let default = variable("RELAY_DEFAULT_WORKSPACE");
    let is_default = |workspace: &&Value| {
        let names = [workspace["workspace_id"].as_str(), workspace["workspace_alias"].as_str()];
        default.as_deref().is_none_or(|default| names.contains(&Some(default)))
    };
    workspaces.iter().find(is_default)?["api_key"].as_str().map(str::to_owned)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn agent_settings(
    settings: &Init,
    working_directory: PathBuf,
    api_url: String,
    continuity: ContinuityFolder,
) -> AgentSettings {
    AgentSettings {
        working_directory,
        api_url,
        max_agents: settings.max_agents,
        default_channels: settings.default_channels.clone(),
        mcp_command: settings.mcp_command.clone(),
        share_workspace_key: settings.share_workspace_key,
        allow_permission_bypass: settings.allow_permission_bypass,
        receipts: settings.receipts,
        continuity,
        minimum_high: if settings.confirm_high_priority { Level::InContext } else { Level::Echoed },
    }
}

async fn serve_metrics(
    settings: &Init,
    recorder: metrics::Handle,
    api: &Api,
    long_running: &TaskSet,
    stop: CancellationToken,
) -> Result<Option<tokio::task::JoinHandle<()>>> {
    let Some(address) = settings.metrics else { return Ok(None) };
    let api = api.clone();
    let readiness = Arc::new(move || api.broker().is_some_and(|broker| broker.services.link.is_up()));
    let served = metrics::serve(address, recorder, readiness, stop).await;
    let (_, server) = served.with_context(|| format!("listen on {address}"))?;
    Ok(Some(long_running.spawn("metrics-server", server)))
}

/// Logs why a server ended; its end stops the broker.
async fn log_failure(server: impl Future<Output = std::io::Result<()>>) {
    if let Err(error) = server.await {
        tracing::error!(%error, "server failed");
    }
}

/// Prints the line that drivers wait for. A closed stdout must not stop the broker.
fn announce(url: &str) {
    let mut stdout = std::io::stdout();
    let printed = writeln!(stdout, "[agent-relay] API listening on {url}").and_then(|()| stdout.flush());
    if let Err(error) = printed {
        tracing::debug!(%error, "the address could not be printed");
    }
}

/// Environment and memory hold keys: agents run as the same user and must not read them through `/proc`.
fn forbid_tracing() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user may read the broker's memory");
    }
}
