//! [`StartedProcess`]: the program of an agent in its terminal.

use std::{ffi::OsString, path::PathBuf, sync::Arc};

use relay_pty::{EventStream, ProcessIdentity, PtyError, SpawnRequest, Terminal};
use tokio::time::Instant;

use super::{
    AgentError, AgentHandle, AgentSpec, Services, SessionSource, ack_files::AckFolder, environment::environment,
    mcp::mcp_servers,
};
use crate::{harness::Harness, insight::ProgramVersion, linux::WatchedFolder, state::AgentRecord};

/// Everything that is needed to start the program of one agent, also once more.
pub(super) struct Launch {
    pub(super) services: Services,
    pub(super) handle: AgentHandle,
    pub(super) harness: Option<Arc<Harness>>,
    /// Under which its figures are kept.
    pub(super) program: ProgramVersion,
    pub(super) ack_folder: Option<AckFolder>,
    pub(super) ack_watch: Option<WatchedFolder>,
    pub(super) working_directory: PathBuf,
}

/// A program that runs.
pub(super) struct StartedProcess {
    pub(super) terminal: Terminal,
    pub(super) events: EventStream,
    pub(super) started_at: Instant,
}

impl StartedProcess {
    /// Starts the program and writes down who runs, so that a later broker can end it. `resumes` continues the session
    /// of the agent.
    pub(super) async fn start(launch: &Launch, resumes: bool) -> Result<Self, AgentError> {
        let Launch { services, handle, .. } = launch;
        let spec = &handle.spec;
        let marker = uuid::Uuid::new_v4().simple().to_string();
        let args = launch.arguments(resumes);
        // Before the program starts, which may write acks from its first moment on.
        if !launch.continues_session(resumes) {
            launch.clear_acks().await;
        }
        let ack_folder = launch.ack_folder.as_ref().map(AckFolder::path);
        let request = SpawnRequest {
            args: args.into_iter().map(OsString::from).collect(),
            working_directory: Some(launch.working_directory.clone()),
            environment: environment(services, spec, handle, ack_folder),
            account: services.settings.account.clone(),
            ..SpawnRequest::new(spec.program.as_str(), marker.as_str())
        };
        let (terminal, events) = services.host.spawn(request).await.map_err(|error| {
            // The broker is stopping; the program is not at fault.
            if matches!(error, PtyError::ShuttingDown) {
                AgentError::Disappeared
            } else {
                AgentError::SpawnFailed(error.to_string())
            }
        })?;
        // After the start, which gives the id. If the broker is killed in between, its terminal closes and hangs the
        // program up.
        match launch.write_down(marker, terminal.identity()).await {
            Ok(()) => Ok(Self { terminal, events, started_at: Instant::now() }),
            Err(problem) => {
                // A later broker would not know the program.
                if let Err(error) = terminal.end(std::time::Duration::ZERO).await {
                    tracing::error!(agent.name = spec.name, %error, "a program could not be ended");
                }
                Err(problem)
            }
        }
    }
}

impl Launch {
    /// Writes down who runs, so that a later broker can end it.
    pub(super) async fn write_down(&self, marker: String, identity: ProcessIdentity) -> Result<(), AgentError> {
        let Self { services, handle, .. } = self;
        let record = AgentRecord {
            spec: AgentSpec { channels: handle.channels(), ..handle.spec.as_ref().clone() },
            agent_id: handle.binding.agent_id().unwrap_or_default(),
            marker,
            pid: identity.pid,
            start_ticks: identity.start_ticks,
            // The roster keeps a `true` of the session that is resumed.
            task_typed: false,
        };
        let (roster, name) = (services.roster.clone(), handle.spec.name.clone());
        match tokio::task::spawn_blocking(move || roster.put(&name, record)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(AgentError::State(format!("{error:#}"))),
            Err(error) => Err(AgentError::State(error.to_string())),
        }
    }

    /// Returns whether the program may know messages of an earlier process.
    fn continues_session(&self, resumes: bool) -> bool {
        let spec = &self.handle.spec;
        match spec.session_source {
            SessionSource::New => resumes && spec.is_resumable,
            SessionSource::Continued | SessionSource::InArguments => true,
        }
    }

    /// Removes the acks of earlier processes. An engine repeats messages under their ids, and an ack of a process that
    /// has ended would prove that the new one has its copy.
    async fn clear_acks(&self) {
        if let Some(folder) = self.ack_folder.clone()
            && let Err(error) = tokio::task::spawn_blocking(move || folder.clear()).await
        {
            tracing::error!(agent.name = self.handle.spec.name, %error, "acks of earlier processes were not removed");
        }
    }

    /// Arguments of the program: those of its harness, then those of the request.
    fn arguments(&self, resumes: bool) -> Vec<String> {
        let (services, spec) = (&self.services, &self.handle.spec);
        let Some(harness) = self.harness.as_ref().filter(|_| !spec.skip_relay_prompt) else {
            return spec.args.clone();
        };
        let mut args = harness.model_arguments(spec.model.as_deref(), &spec.args);
        let resumes = match spec.session_source {
            SessionSource::New => Some(resumes),
            SessionSource::Continued => Some(true),
            SessionSource::InArguments => None,
        };
        if let Some(resumes) = resumes {
            args.extend(harness.session_arguments(spec.session_id.as_deref(), resumes, &spec.args));
        }
        args.extend(harness.mcp_arguments(&mcp_servers(services, &self.handle), &spec.args));
        if services.settings.allow_permission_bypass || spec.allow_permission_bypass {
            args.extend(harness.permission_bypass_args.iter().cloned());
        }
        args.extend(spec.args.iter().cloned());
        args
    }
}
