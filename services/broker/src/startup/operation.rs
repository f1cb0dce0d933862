//! [`Operation`]: the broker from the moment it has joined until it stops.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::Result;
use relay_pty::PtyHost;
use relay_tasks::{TaskSet, spawn_isolated};
use relay_verification::Level;
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tokio_util::task::TaskTracker;

use super::{api_server::ApiServer, local_state::LocalState};
use crate::{
    agents::{
        AgentSettings, Agents, ContinuityFolder, Members, Services, SharedServices, Spawner, run_receipts, run_reports,
    },
    api::{Broker, release_agent},
    cli::Init,
    engine::{Engine, Identity},
    engine_link::{LinkSettings, LinkTask, Manifest},
    insight::{VerificationBook, show_queues},
    invocations::{self, Handlers},
    linux::FolderWatch,
    restore,
    runner::Runners,
    state::{AgentRecord, Roster},
};

/// Maximum time for agents to end politely when the broker stops; the whole stop takes less than 4 s.
const STOP_GRACE: Duration = Duration::from_millis(1500);
// Longer than the grace: the tasks of agents store outcomes after their programs have ended.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(2500);
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Receipts that wait to be posted. Further ones are dropped and counted.
const RECEIPTS: usize = 1024;
/// Invocations that wait to be handled. Further ones are left to the engine's time-out.
const INVOCATIONS: usize = 256;

/// The running broker.
pub(super) struct Operation {
    services: Services,
    members: Members,
    runners: Arc<Runners>,
    restoring: JoinHandle<()>,
    invocations: Vec<JoinHandle<()>>,
    reporters: Vec<JoinHandle<()>>,
}

impl Operation {
    /// Starts the tasks, opens the API, and starts the agents of the previous broker again. The first identity is that
    /// of the default workspace.
    pub(super) fn start(
        settings: &Init,
        state: LocalState,
        server: &ApiServer,
        engine: Engine,
        identities: Vec<Identity>,
        tasks: &TaskSet,
    ) -> Self {
        let api = &server.api.inner;
        let (receipts, receipts_inbox) = mpsc::channel(RECEIPTS);
        let (reports, reports_inbox) = mpsc::channel(RECEIPTS);
        let agent_settings = agent_settings(settings, &state, server, identities.len());
        let LocalState {
            harnesses, host, roster, project_files, ledger, verification, crashes, restorable_agents, ..
        } = state;
        let shared = SharedServices {
            host,
            engine: engine.clone(),
            hub: api.hub.clone(),
            ledger,
            roster: roster.clone(),
            project_files,
            agents: Arc::<Agents>::default(),
            harnesses,
            receipts,
            reports,
            crashes,
            dead_letters: Arc::default(),
            verification: verification.clone(),
            ack_watch: FolderWatch::new(),
            counters: Arc::default(),
            held: Arc::default(),
            tasks: TaskTracker::new(),
            settings: Arc::new(agent_settings),
        };
        let runners = Arc::<Runners>::default();
        let joined =
            identities.into_iter().map(|identity| serve_workspace(settings, &shared, &runners, identity, tasks));
        let (members, invocations): (Vec<Spawner>, Vec<JoinHandle<()>>) = joined.unzip();
        let members = Members::new(members);
        let reporters = vec![
            tasks.spawn("queue-gauges", show_queues(members.clone(), runners.clone())),
            tasks.spawn("reports", run_reports(engine.clone(), reports_inbox)),
            tasks.spawn("receipts", run_receipts(engine, api.hub.clone(), receipts_inbox)),
            tasks.spawn("verification-file", verification.keep_written()),
            tasks.spawn("roster-file", roster.clone().keep_written()),
        ];
        let services = members.default_workspace().services().clone();
        let broker = Broker { services: services.clone(), members: members.clone(), runners: runners.clone() };
        let is_new = api.broker.set(broker).is_ok();
        debug_assert!(is_new, "the broker is set once");
        // Not in the task set: it returns once the agents run, and the end of a task of the set stops the broker.
        let restoring = spawn_isolated("restore", restore::start(members.clone(), restorable_agents, roster));
        Self { services, members, runners, restoring, invocations, reporters }
    }

    /// Ends the agents, writes the state, and says goodbye to the engine.
    pub(super) async fn stop(self) {
        let Self { services, members, runners, restoring, invocations, reporters } = self;
        // First, so that neither starts further agents. Programs that are about to start are refused by the host, which
        // shuts down below.
        restoring.abort();
        invocations.iter().for_each(JoinHandle::abort);
        // Before the agents end: each takes itself out of the roster.
        let running = services.roster.agents();
        let runner_ended = timeout(RELEASE_TIMEOUT, runners.supervisor.stopped());
        // Side by side, since the times of both would add up to more than a stop may take.
        let ((), ended) = tokio::join!(stop_agents(&services.host, &services), runner_ended);
        if ended.is_err() {
            tracing::error!("the program of the runner has not ended in time");
        }
        // After the removals by the agents, which would take the agents out again.
        keep_roster(services.roster.clone(), running).await;
        // After the agents: their last outcomes move the acks that are sent before the goodbye.
        if timeout(LEAVE_TIMEOUT, members.leave()).await.is_err() {
            tracing::warn!("deregistration timed out, the engine will expire the node");
        }
        reporters.iter().for_each(JoinHandle::abort);
        keep_learned(services.verification.clone()).await;
    }
}

/// Starts the node of one workspace: its socket, and what handles its invocations.
fn serve_workspace(
    settings: &Init,
    shared: &SharedServices,
    runners: &Arc<Runners>,
    identity: Identity,
    tasks: &TaskSet,
) -> (Spawner, JoinHandle<()>) {
    let (invocation_sender, invocation_inbox) = mpsc::channel(INVOCATIONS);
    let (link, link_task) = LinkTask::new(LinkSettings {
        engine: shared.engine.clone(),
        identity: identity.clone(),
        socket_base: settings.engine_socket_url.clone().filter(|url| !url.is_empty()),
        hub: shared.hub.clone(),
        manifest: bootstrap_manifest(settings, &identity),
        invocations: invocation_sender,
    });
    tracing::info!(
        workspace.id = identity.workspace_id,
        node.id = identity.node_id,
        node.name = identity.node_name,
        "broker ready"
    );
    let services = Services { shared: shared.clone(), link, identity: Arc::new(identity) };
    let spawner = Spawner::new(services.clone());
    tasks.spawn("engine-link", link_task.run());
    let handlers = Handlers { services, spawner: spawner.clone(), runners: runners.clone() };
    (spawner, tasks.spawn("invocations", invocations::run(handlers, invocation_inbox)))
}

/// Ends all agents together, those that are starting included, and refuses further ones.
async fn stop_agents(host: &PtyHost, services: &Services) {
    // Closed first: the host below refuses further programs in terminals, but does not see agents without one.
    let release = services
        .agents
        .close()
        .into_iter()
        .map(|name| async move { release_agent(services, &name, Some("shutdown".to_owned())).await });
    let released = futures::future::join_all(release);
    // The host ends all programs within one grace. The releases run beside it so that tasks finish and store settled
    // messages.
    let (ended, _) = tokio::join!(host.shutdown(STOP_GRACE), timeout(RELEASE_TIMEOUT, released));
    match ended {
        Ok(report) if report.survivors.is_empty() => {}
        Ok(report) => tracing::error!(survivors = ?report.survivors, "failed to end all processes of the agents"),
        Err(error) => tracing::error!(%error, "the agents could not be ended"),
    }
}

/// Stores the agents that ran, for `--resume`.
async fn keep_roster(roster: Arc<Roster>, running: BTreeMap<String, AgentRecord>) {
    let written = tokio::task::spawn_blocking(move || roster.stop(running)).await;
    if let Ok(Err(error)) = written {
        tracing::error!(
            error = format!("{error:#}"),
            "failed to store the shutdown, the next start takes it for a crash"
        );
    }
}

/// Stores the verification statistics of agent programs.
async fn keep_learned(verification: Arc<VerificationBook>) {
    let written: Result<Result<()>, _> = tokio::task::spawn_blocking(move || verification.write()).await;
    if let Ok(Err(error)) = written {
        tracing::warn!(error = format!("{error:#}"), "failed to store verification statistics, the latest are lost");
    }
}

fn bootstrap_manifest(settings: &Init, identity: &Identity) -> Manifest {
    Manifest::bootstrap(&identity.node_id, &identity.node_name, &settings.spawn, settings.max_agents)
}

fn agent_settings(settings: &Init, state: &LocalState, server: &ApiServer, workspaces: usize) -> AgentSettings {
    AgentSettings {
        names_workspace: workspaces > 1,
        working_directory: state.working_directory.clone(),
        api_url: server.local_url.clone(),
        account: state.account.clone(),
        max_agents: settings.max_agents,
        default_channels: settings.default_channels.clone(),
        mcp_command: settings.mcp_command.clone(),
        share_workspace_key: settings.share_workspace_key,
        allow_permission_bypass: settings.allow_permission_bypass,
        answered_gates: settings.answer_gates.clone(),
        ack_hint: settings.ack_hint,
        receipts: settings.receipts,
        continuity: ContinuityFolder::new(server.directory.path()),
        minimum_high: if settings.confirm_high_priority { Level::InContext } else { Level::Echoed },
    }
}
