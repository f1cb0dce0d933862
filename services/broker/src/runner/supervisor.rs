//! [`Supervisor`]: starts the program of a runner again when it has ended.

use std::{
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use relay_pty::PtyHost;
use relay_tasks::spawn_isolated;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Runners;
use crate::{
    agents::{RestartCount, withheld_variables},
    api::types::Supervision,
    process_group::ProcessGroup,
};

/// A runner that the broker has not started shows its end only by its socket. Published ones connect again within 5 s.
const UNKNOWN_PROCESS_PATIENCE: Duration = Duration::from_secs(10);
/// A program that was asked to end is killed after this time, and its children with it.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// Bytes of output in one line of the log.
const LOG_LINE: usize = 4096;

/// The one supervision in force.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    current: Mutex<Option<(Supervision, CancellationToken)>>,
    tasks: TaskTracker,
}

impl Supervisor {
    /// Puts a supervision in force until [`Self::end`]. The one that is in force already goes on.
    pub(super) fn begin(
        &self,
        supervision: Supervision,
        runner: String,
        runners: Arc<Runners>,
        host: PtyHost,
        stop: CancellationToken,
    ) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // A runner registers with each connection: the count of its restarts must go on.
        if current.as_ref().is_some_and(|(known, end)| *known == supervision && !end.is_cancelled()) {
            return;
        }
        let end = CancellationToken::new();
        if let Some((_, earlier)) = current.replace((supervision.clone(), end.clone())) {
            earlier.cancel();
        }
        if supervision.restart_policy.enabled {
            let program = Program { supervision, runner, host, stop };
            self.tasks.spawn(async move { program.supervise(&runners, end).await });
        }
    }

    /// Ends the supervision. The program itself is left alone.
    pub(super) fn end(&self) {
        if let Some((_, end)) = self.current.lock().unwrap_or_else(PoisonError::into_inner).take() {
            end.cancel();
        }
    }

    /// Waits until the programs have ended that were started here. They end when the broker stops.
    pub(crate) async fn stopped(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

struct Program {
    supervision: Supervision,
    runner: String,
    host: PtyHost,
    stop: CancellationToken,
}

impl Program {
    /// Starts the program whenever it has ended with an error, as its policy allows.
    async fn supervise(&self, runners: &Runners, end: CancellationToken) {
        let mut restarts = RestartCount::default();
        let (mut life, mut patience) = (Duration::ZERO, UNKNOWN_PROCESS_PATIENCE);
        let ended = async || tokio::select! { () = end.cancelled() => {}, () = self.stop.cancelled() => {} };
        loop {
            tokio::select! {
                () = runners.wait_absent(patience) => {}
                () = ended() => return,
            }
            let pause = match restarts.on_failure(&self.supervision.restart_policy, life) {
                Ok(pause) => pause,
                Err(reason) => {
                    tracing::error!(runner.name = self.runner, reason, "the runner is not started again");
                    return;
                }
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = ended() => return,
            }
            let began = Instant::now();
            if self.run_once().await || end.is_cancelled() || self.stop.is_cancelled() {
                return;
            }
            // The end of this process was seen, so no time without a socket has to show it.
            (life, patience) = (began.elapsed(), Duration::ZERO);
        }
    }

    /// Runs the program until its end, and ends what it leaves behind. Returns whether that was a clean end.
    async fn run_once(&self) -> bool {
        let marker = uuid::Uuid::new_v4().simple().to_string();
        let (mut child, processes) = match ProcessGroup::start(&mut self.command(), marker, self.host.clone()) {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(runner.name = self.runner, %error, "the runner cannot be started");
                return false;
            }
        };
        tracing::info!(runner.name = self.runner, pid = child.id(), "the runner was started again");
        if let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
            // They end with the last process that has them open.
            spawn_isolated("runner-output", log(self.runner.clone(), stdout));
            spawn_isolated("runner-output", log(self.runner.clone(), stderr));
        }
        let status = tokio::select! {
            status = child.wait() => Some(status),
            () = self.stop.cancelled() => {
                processes.terminate();
                // Whatever is left after the grace is killed.
                let _ = timeout(STOP_GRACE, child.wait()).await;
                None
            }
        };
        processes.end().await;
        match status {
            None => true,
            Some(Ok(status)) => {
                tracing::warn!(runner.name = self.runner, %status, "the runner has ended");
                status.success()
            }
            Some(Err(error)) => {
                tracing::error!(runner.name = self.runner, %error, "the runner's end cannot be seen");
                false
            }
        }
    }

    fn command(&self) -> Command {
        let Supervision { argv, cwd, env, .. } = &self.supervision;
        let (program, args) = argv.split_first().map_or(("", argv.as_slice()), |(first, rest)| (first.as_str(), rest));
        let mut command = Command::new(program);
        command.args(args);
        // A runner reads the key of the listen API from the connection file, or is given what it needs in `env`.
        withheld_variables().for_each(|name| {
            command.env_remove(name);
        });
        command.envs(env);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(cwd) = cwd {
            command.current_dir(cwd);
        }
        command
    }
}

async fn log(runner: String, mut output: impl AsyncRead + Unpin) {
    let mut buffer = vec![0; LOG_LINE];
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        for line in String::from_utf8_lossy(&buffer[..count]).lines() {
            tracing::info!(runner.name = runner, line, "output of the runner");
        }
    }
}
