//! Agents: spawn, release, preflight.

use std::{path::PathBuf, sync::Arc};

use axum::Json;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Broker, UNKNOWN_WORKSPACE,
    error::{ApiError, ApiResult},
    extract::{Body, Path, Ready},
    types::SpawnBody,
};
use crate::agents::{
    AgentCommand, AgentError, AgentSpec, Headless, ResultSchema, Services, SessionSource, SpawnSource,
};
use crate::harness::Harness;

const DEFAULT_CLI: &str = "claude";
const DEFAULT_IDLE_SECS: u64 = 30;
/// Instruction to end after the task.
const EXIT_INSTRUCTION: &str = "When the task is done, print /exit on a line of its own.";

/// `POST /api/spawn`
pub(super) async fn spawn(ready: Ready, body: Body) -> ApiResult<Json<Value>> {
    let body: SpawnBody = body.parse().map_err(ApiError::flagged)?;
    let name = body.name.clone();
    let flagged = |error: ApiError| error.flagged_with("name", &name);
    let spec = body.into_spec(&ready.services).map_err(|error| flagged(error.into()))?;
    let answer = start_agent(&ready, spec, SpawnSource::HttpApi).await;
    Ok(Json(answer.map_err(|error| flagged(error.into()))?))
}

/// Starts an agent, also when the caller gives up, and returns the answer for drivers.
pub(crate) async fn start_agent(broker: &Broker, spec: AgentSpec, source: SpawnSource) -> Result<Value, AgentError> {
    let (name, model, session) = (spec.name.clone(), spec.model.clone(), spec.session_id.clone());
    let runtime = spec.runtime();
    let member = broker.members.named(spec.workspace.as_deref());
    let spawner = member.cloned().ok_or_else(|| AgentError::Invalid(UNKNOWN_WORKSPACE.to_owned()))?;
    let running = broker.services.tasks.spawn(async move { spawner.spawn(spec, source, Vec::new()).await });
    let spawned = running.await.map_err(|error| AgentError::State(error.to_string()))??;
    Ok(json!({
        "success": true,
        "name": name,
        "runtime": runtime,
        "model": model,
        "sessionId": session,
        "pid": spawned.pid,
        "pre_registered": spawned.pre_registered,
        "warning": spawned.warning,
    }))
}

impl SpawnBody {
    fn check_name(&self) -> Result<(), AgentError> {
        let problem = match self.name.as_str() {
            name if name.trim().is_empty() || name.contains(['\n', '\r']) => "name must be one line and not blank",
            "." | ".." => "name must not be . or ..: clients remove both from the paths of their calls",
            _ => return Ok(()),
        };
        Err(AgentError::Invalid(problem.to_owned()))
    }

    fn exits_after_task(&self) -> Result<bool, AgentError> {
        match self.spawn_mode.as_deref().map(str::to_ascii_lowercase).as_deref() {
            None | Some("interactive") => Ok(self.exit_after_task),
            Some("task_exit" | "task-exit" | "single_shot" | "single-shot") => Ok(true),
            Some(_) => Err(AgentError::Invalid("spawnMode must be interactive or task_exit".to_owned())),
        }
    }

    /// Checks the request and resolves the program.
    pub(crate) fn into_spec(self, services: &Services) -> Result<AgentSpec, AgentError> {
        let invalid = |text: &str| Err(AgentError::Invalid(text.to_owned()));
        self.check_name()?;
        let exits = self.exits_after_task()?;
        if self.harness_id.is_some_and(|id| !id.is_null()) {
            return invalid("harnessId is not supported, send harnessConfig");
        }
        // Before anything is registered: a wrong schema must leave no agent at the engine.
        if let Some(schema) = &self.agent_result_schema {
            ResultSchema::compile(schema).map_err(AgentError::Invalid)?;
        }
        let config = self.harness_config.unwrap_or_default();
        let is_headless = is_headless(&[self.transport.as_deref(), config.runtime.as_deref()])?;
        let label = self.cli.filter(|cli| !cli.trim().is_empty());
        let command_line = config.command.clone().or(label.clone()).unwrap_or_else(|| DEFAULT_CLI.to_owned());
        let ResolvedProgram { program, words, model, harness } =
            ResolvedProgram::find(services, &command_line, self.model)?;
        // A driver that has resolved the program has resolved its arguments as well.
        let own_args = if config.command.is_some() { config.args } else { self.args };
        let cwd = config.cwd.or(self.cwd).filter(|cwd| !cwd.is_empty()).map(PathBuf::from);
        let settings = &services.settings;
        let cwd = cwd.map(|cwd| settings.working_directory.join(cwd));
        let (given_session, session_source) = given_session(config.session_id, self.session_id);
        // An id of the broker lets a later process resume the session. With `skip_relay_prompt` the program gets no
        // arguments of the broker, so it would not know the id.
        let can_choose = !is_headless && harness.as_ref().is_some_and(|entry| !entry.session_new_args.is_empty());
        let session_id =
            given_session.or_else(|| (can_choose && !self.skip_relay_prompt).then(|| uuid::Uuid::new_v4().to_string()));
        let headless = match (is_headless, config.runtime) {
            (false, _) => None,
            (true, Some(_)) => Some(Headless::AppServer(config.app_server.into_server(session_id.as_deref())?)),
            (true, None) => Some(headless_program(harness.as_deref(), model.as_deref(), &own_args)?),
        };
        let channels = if self.channels.is_empty() { settings.default_channels.clone() } else { self.channels };
        let task = self.task.filter(|task| !task.trim().is_empty());
        Ok(AgentSpec {
            name: self.name,
            workspace: self.workspace_id.or(self.workspace_alias),
            cli: label.unwrap_or_else(|| command_line.clone()),
            program,
            args: words.into_iter().chain(own_args).collect(),
            cwd,
            env: config.env,
            provider: self.provider.or_else(|| harness.as_ref().map(|entry| entry.name.clone())),
            model,
            task: task.map(|task| if exits { format!("{task}\n{EXIT_INSTRUCTION}") } else { task }),
            continue_from: self.continue_from.filter(|name| !name.is_empty()),
            channels: channels.iter().map(|name| name.trim_start_matches('#').to_owned()).collect(),
            team: self.team,
            parent: self.parent,
            is_resumable: session_id.is_some() && can_resume(headless.as_ref(), harness.as_deref()),
            session_id,
            session_source,
            idle_threshold_secs: self.idle_threshold_secs.unwrap_or(DEFAULT_IDLE_SECS),
            restart_policy: self.restart_policy,
            skip_relay_prompt: self.skip_relay_prompt,
            allow_permission_bypass: self.allow_permission_bypass,
            agent_token: self.agent_token,
            verification: config.metadata.unwrap_or_default().verification,
            result_schema: self.agent_result_schema,
            invocation_id: self.invocation_id,
            headless,
        })
    }
}

/// Program of a command line.
struct ResolvedProgram {
    program: String,
    /// Arguments in the command line.
    words: Vec<String>,
    model: Option<String>,
    harness: Option<Arc<Harness>>,
}

impl ResolvedProgram {
    /// Splits a command line. `harness:model` names a known program and its model.
    fn find(services: &Services, command_line: &str, model: Option<String>) -> Result<Self, AgentError> {
        let words = shell_words::split(command_line);
        let words = words.map_err(|error| AgentError::Invalid(format!("cli cannot be split: {error}")))?;
        let mut words = words.into_iter();
        let Some(program) = words.next().filter(|program| !program.is_empty()) else {
            return Err(AgentError::Invalid("cli names no program".to_owned()));
        };
        let (words, model) = (words.collect(), model.filter(|model| !model.is_empty()));
        if let (None, Some((base, named))) = (services.harnesses.find(&program), program.split_once(':'))
            && let Some(harness) = services.harnesses.find(base)
        {
            let model = model.or_else(|| Some(named.to_owned()));
            return Ok(Self { program: base.to_owned(), words, model, harness: Some(harness) });
        }
        let harness = services.harnesses.find(&program);
        Ok(Self { program, words, model, harness })
    }
}

/// The session that a driver names: in the arguments of its own program, or as one to continue.
fn given_session(rendered: Option<String>, continued: Option<String>) -> (Option<String>, SessionSource) {
    let given = |session: Option<String>| session.filter(|session| !session.is_empty());
    match (given(rendered), given(continued)) {
        (Some(session), _) => (Some(session), SessionSource::InArguments),
        (None, Some(session)) => (Some(session), SessionSource::Continued),
        (None, None) => (None, SessionSource::New),
    }
}

/// Returns whether a later process continues the same session.
fn can_resume(headless: Option<&Headless>, harness: Option<&Harness>) -> bool {
    match headless {
        Some(Headless::AppServer(_)) => true,
        Some(Headless::Program(_)) => false,
        None => harness.is_some_and(|entry| !entry.session_resume_args.is_empty()),
    }
}

/// Returns whether the agent has no terminal, by the words that a driver may give.
fn is_headless(words: &[Option<&str>]) -> Result<bool, AgentError> {
    let mut found = None;
    for word in words.iter().flatten() {
        let is_headless = match *word {
            "pty" => false,
            "headless" | "app_server" => true,
            _ => return Err(AgentError::Invalid("runtime must be pty or headless".to_owned())),
        };
        if found.replace(is_headless).is_some_and(|other| other != is_headless) {
            return Err(AgentError::Invalid("transport and harnessConfig.runtime contradict each other".to_owned()));
        }
    }
    Ok(found.unwrap_or_default())
}

/// The run of a known program for each message.
fn headless_program(harness: Option<&Harness>, model: Option<&str>, given: &[String]) -> Result<Headless, AgentError> {
    let harness = harness.filter(|harness| !harness.headless_args.is_empty()).ok_or_else(|| {
        AgentError::Invalid("headless agents need harnessConfig, or a program that runs without a terminal".to_owned())
    })?;
    let mut args = harness.headless_args.clone();
    args.extend(harness.model_arguments(model, given));
    Ok(Headless::Program(args))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ReleaseBody {
    reason: Option<String>,
}

/// `DELETE /api/spawned/{name}`: 200 for an unknown name too.
pub(super) async fn release(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    let body: ReleaseBody = body.parse_optional().map_err(|error| error.flagged_with("name", &name))?;
    release_agent(&ready.services, &name, body.reason).await;
    Ok(Json(json!({ "success": true, "name": name })))
}

/// Releases an agent and waits until it has ended, also one that is being started.
pub(crate) async fn release_agent(services: &Services, name: &str, reason: Option<String>) {
    services.agents.end_start(name).await;
    // A start may have been too far to be ended: then the agent runs by now.
    if let Ok(agent) = services.agents.get(name) {
        // An agent that ends by itself meanwhile is released as well.
        let _ = agent.ask(|reply| AgentCommand::Release { reason, reply }).await;
    }
}

#[derive(Debug, Deserialize)]
struct PreflightBody {
    #[serde(deserialize_with = "relay_wire::field::objects")]
    agents: Vec<PreflightAgent>,
}

#[derive(Debug, Deserialize)]
struct PreflightAgent {
    #[serde(default)]
    cli: String,
}

/// `POST /api/preflight`: resolves harnesses and starts nothing.
pub(super) async fn preflight(ready: Ready, body: Body) -> ApiResult<Json<Value>> {
    let body: PreflightBody = body.parse()?;
    for agent in &body.agents {
        let is_known = ready.services.harnesses.find(&agent.cli).is_some();
        tracing::debug!(cli = agent.cli, is_known, "an agent is announced");
    }
    Ok(Json(json!({ "queued": body.agents.len() })))
}
