//! [`Spawner`]: from a request to a running agent, with every step undone if a later one fails.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use futures::future::BoxFuture;
use relay_verification::{RequiredChannels, strategy::Strategy};
use serde_json::json;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::{Instant, timeout_at},
};

use super::{
    AgentBinding, AgentCommand, AgentError, AgentHandle, AgentInfo, AgentSpec, ResultSchema, Services, SpawnSource,
    ack_files::AckFolder,
    command::{COMMANDS, INPUT_STREAMS},
    headless::HeadlessTask,
    mcp::configure_servers,
    process::{Launch, StartedProcess},
    registration::IdentifiedAgent,
    task::AgentTask,
};
use crate::{
    api::types::{Event, ProcessFacts},
    clock,
    engine::{Engine, EngineError, Request},
    harness::Harness,
    injection::Profile,
    insight::ProgramVersion,
    metric_names,
};

/// Time for joining the agent's channels; a failure is a warning.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Warning of a start without the engine.
const UNBOUND: &str =
    "the engine is unavailable: the agent is bound, joins its channels and gets messages once it is available";

/// An agent that was started.
#[derive(Debug)]
pub(crate) struct SpawnedAgent {
    /// None without a terminal.
    pub(crate) pid: Option<i32>,
    pub(crate) pre_registered: bool,
    pub(crate) warning: Option<String>,
}

/// An agent whose task does not run yet.
struct StartedAgent {
    handle: AgentHandle,
    /// None without a terminal.
    pid: Option<i32>,
    life: BoxFuture<'static, ()>,
}

/// Starts agents. Clones share everything.
#[derive(Clone)]
pub(crate) struct Spawner {
    services: Services,
}

impl Spawner {
    pub(crate) fn new(services: Services) -> Self {
        Self { services }
    }

    /// Services shared by the agents of this workspace.
    pub(crate) fn services(&self) -> &Services {
        &self.services
    }

    /// Starts an agent. `had` are the messages that its session has already.
    pub(crate) async fn spawn(
        &self,
        mut spec: AgentSpec,
        source: SpawnSource,
        had: Vec<String>,
    ) -> Result<SpawnedAgent, AgentError> {
        let services = &self.services;
        spec.workspace = Some(services.identity.workspace_id.clone());
        self.introduce(&mut spec).await?;
        let reservation = services.agents.reserve(&spec.name, services.settings.max_agents)?;
        let released = reservation.released();
        let identified = released.run_until_cancelled(self.identify(&spec, source, had)).await;
        // Released meanwhile. The link takes back a registration whose reply finds no receiver.
        let agent = identified.unwrap_or(Err(AgentError::Disappeared))?;
        let is_unbound = agent.binding.is_unbound();
        let warning = match is_unbound {
            true => Some(UNBOUND.to_owned()),
            false => {
                let joined = join_channels(&services.engine, &agent.token, &spec.channels).await;
                joined.err().map(|error| error.to_string())
            }
        };
        // Again: a release may have come while the channels were joined, which it does not interrupt.
        let started = match released.is_cancelled() {
            true => Err(AgentError::Disappeared),
            false => self.start(&spec, &agent, source).await,
        };
        let StartedAgent { handle, pid, life } = match started {
            Ok(started) => started,
            Err(error) => {
                // Before the name is free: the next agent of the name has the same entries in files of projects.
                self.undo(&spec.name, &agent.binding).await;
                return Err(error);
            }
        };
        let pre_registered = spec.agent_token.is_some();
        let facts = process_facts(&spec, pid);
        services.counters.spawned.fetch_add(1, Ordering::Relaxed);
        metrics::counter!(metric_names::SPAWNS).increment(1);
        // Before the agent's task runs: none of its events may precede this one.
        let event = Event::AgentSpawned {
            process: facts,
            parent: spec.parent.clone(),
            source: source.as_str(),
            pre_registered,
            registration_warning: warning.clone(),
        };
        services.hub.publish(&spec.name, &event);
        reservation.run(handle.clone());
        // Last: the program may end at once, and its end frees the name.
        services.tasks.spawn(life);
        if is_unbound {
            services.tasks.spawn(self.clone().bind_later(handle, agent.mailbox));
        }
        services.link.announce();
        Ok(SpawnedAgent { pid, pre_registered, warning })
    }

    /// Takes back what was done for an agent whose program could not be started.
    async fn undo(&self, name: &str, binding: &AgentBinding) {
        if let Some(agent_id) = binding.end() {
            self.services.link.unhost(name, &agent_id);
        }
        let (files, agent) = (self.services.project_files.clone(), name.to_owned());
        if let Err(error) = tokio::task::spawn_blocking(move || files.remove(&agent)).await {
            tracing::error!(agent.name = name, %error, "files of a project were not restored");
        }
    }

    /// Puts the notes of an earlier agent in front of the task.
    async fn introduce(&self, spec: &mut AgentSpec) -> Result<(), AgentError> {
        let Some(from) = spec.continue_from.take() else { return Ok(()) };
        let (folder, agent) = (self.services.settings.continuity.clone(), from.clone());
        let loaded = tokio::task::spawn_blocking(move || folder.load(&agent)).await;
        let loaded = loaded.map_err(|error| AgentError::State(error.to_string()))?;
        let notes = loaded.map_err(|error| AgentError::State(format!("{error:#}")))?;
        let notes = notes.ok_or_else(|| AgentError::Invalid(format!("continueFrom: {from} has saved no notes")))?;
        let task = spec.task.take();
        spec.task = Some(task.map_or_else(|| notes.text(), |task| format!("{}\n\n{task}", notes.text())));
        Ok(())
    }

    /// Facts about an agent for its pipeline.
    fn profile(&self, spec: &AgentSpec, harness: Option<&Harness>, has_tools: bool, has_ack_folder: bool) -> Profile {
        let tools = harness.filter(|_| has_tools);
        Profile {
            agent: spec.name.clone(),
            workspace_alias: self.services.workspace_label(),
            strategy: spec.verification.apply(harness.map_or(Strategy::OTHER, Harness::strategy)),
            usable: RequiredChannels {
                echo: true,
                file: has_tools && has_ack_folder && self.services.settings.ack_hint,
                mcp: has_tools,
                api: true,
            },
            activity: harness.map(|entry| entry.activity.clone()).unwrap_or_default(),
            minimum_high: self.services.settings.minimum_high,
            tool_prefix: tools.map(|entry| entry.tool_prefix.clone()),
            has_suggestions: harness.is_some_and(|harness| harness.ghost_text.is_some()),
        }
    }

    /// Starts the agent's program, if it has a terminal, and makes the task that serves it.
    async fn start(
        &self,
        spec: &AgentSpec,
        agent: &IdentifiedAgent,
        source: SpawnSource,
    ) -> Result<StartedAgent, AgentError> {
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (info, info_receiver) = watch::channel(AgentInfo::starting(clock::unix_ms()));
        let (launch, profile) = self.prepare(spec, agent, info_receiver, commands).await?;
        let handle = launch.handle.clone();
        if let Some(headless) = launch.handle.spec.headless.clone() {
            let base = AgentTask::new(launch, profile, agent.mailbox.clone(), info, inbox);
            let task = HeadlessTask::prepare(base, headless).await?;
            return Ok(StartedAgent { handle, pid: None, life: Box::pin(task.run()) });
        }
        let process = match StartedProcess::start(&launch, source == SpawnSource::Restart).await {
            Ok(process) => process,
            Err(error) => {
                launch.remove_ack_folder().await;
                return Err(error);
            }
        };
        let pid = process.terminal.identity().pid;
        info.send_modify(|info| info.terminal = Some(process.terminal.clone()));
        let task = AgentTask::new(launch, profile, agent.mailbox.clone(), info, inbox);
        Ok(StartedAgent { handle, pid: Some(pid), life: Box::pin(task.run(process)) })
    }

    /// Collects what a start needs: folder for acks, version of the program, MCP servers.
    async fn prepare(
        &self,
        spec: &AgentSpec,
        agent: &IdentifiedAgent,
        info: watch::Receiver<AgentInfo>,
        commands: mpsc::Sender<AgentCommand>,
    ) -> Result<(Launch, Profile), AgentError> {
        let services = &self.services;
        let spec = Arc::new(spec.clone());
        let working_directory = spec.cwd.clone().unwrap_or_else(|| services.settings.working_directory.clone());
        let harness = services.harnesses.find(&spec.program);
        let label = harness.as_ref().map_or_else(|| "other".to_owned(), |entry| entry.name.clone());
        let (ack_folder, program) = {
            let (folder, spec, label) = (working_directory.clone(), spec.clone(), label.clone());
            let account = services.settings.account.clone();
            let prepared = tokio::task::spawn_blocking(move || {
                // An agent without a terminal does not confirm by file.
                let has_acks = spec.headless.is_none() && folder.is_dir();
                let ack_folder = has_acks.then(|| AckFolder::create(&folder, &spec.name, account)).flatten();
                (ack_folder, ProgramVersion::find(&label, &spec.program))
            });
            prepared.await.map_err(|error| AgentError::State(error.to_string()))?
        };
        let result_schema = match &spec.result_schema {
            Some(schema) => Some(Arc::new(ResultSchema::compile(schema).map_err(AgentError::Invalid)?)),
            None => None,
        };
        let handle = AgentHandle {
            harness: label,
            binding: agent.binding.clone(),
            token: agent.token.clone(),
            ack_token: secret("aat_"),
            result_token: secret("arr_"),
            result_schema,
            channels: Arc::new(Mutex::new(spec.channels.clone())),
            spec,
            info,
            input_streams: Arc::new(Semaphore::new(INPUT_STREAMS)),
            commands,
        };
        let has_tools = configure_servers(services, &handle, harness.as_deref(), &working_directory).await;
        let profile = self.profile(&handle.spec, harness.as_deref(), has_tools, ack_folder.is_some());
        let ack_watch = ack_folder.as_ref().and_then(|folder| services.ack_watch.watch(folder.path()));
        let services = services.clone();
        let launch = Launch { services, handle, harness, program, ack_folder, ack_watch, working_directory };
        Ok((launch, profile))
    }
}

/// A channel that was not joined.
#[derive(Debug, thiserror::Error)]
#[error("channel {channel}: {error}")]
pub(super) struct JoinError {
    channel: String,
    error: EngineError,
}

impl JoinError {
    /// Returns whether a retry may succeed.
    pub(super) fn is_transient(&self) -> bool {
        self.error.is_transient()
    }
}

/// Joins channels as the agent, and creates those that do not exist.
pub(super) async fn join_channels(engine: &Engine, token: &str, channels: &[String]) -> Result<(), JoinError> {
    let until = Instant::now() + JOIN_TIMEOUT;
    for channel in channels {
        let joined = timeout_at(until, join_or_create(engine, token, channel)).await;
        let joined = joined.unwrap_or_else(|_| Err(EngineError::TimedOut { url: engine.base_url().to_owned() }));
        joined.map_err(|error| JoinError { channel: channel.clone(), error })?;
    }
    Ok(())
}

/// Joins a channel as the agent, and creates one that does not exist.
pub(crate) async fn join_or_create(engine: &Engine, token: &str, channel: &str) -> Result<(), EngineError> {
    match join(engine, token, channel).await {
        Err(error) if error.has_code("channel_not_found") => {
            let create = Request::post(&["channels"], token, json!({ "name": channel }));
            match engine.call(create).await {
                // The creator is a member.
                Ok(_) => Ok(()),
                // Another agent has created it since the first attempt.
                Err(error) if error.has_code("channel_already_exists") => join(engine, token, channel).await,
                Err(error) => Err(error),
            }
        }
        answer => answer,
    }
}

async fn join(engine: &Engine, token: &str, channel: &str) -> Result<(), EngineError> {
    engine.call(Request::post(&["channels", channel, "join"], token, json!({}))).await.map(drop)
}

/// Facts about an agent's process, for events.
pub(super) fn process_facts(spec: &AgentSpec, pid: Option<i32>) -> ProcessFacts {
    ProcessFacts {
        runtime: spec.runtime(),
        provider: spec.provider.clone(),
        cli: spec.cli.clone(),
        model: spec.model.clone(),
        session_id: spec.session_id.clone(),
        pid,
    }
}

fn secret(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::new_v4().simple())
}
