//! One run of a headless agent's program: the message is its last argument, and its exit status is the answer.

use std::{collections::BTreeMap, ffi::OsString, io, path::PathBuf, process::Stdio, sync::Arc};

use relay_pty::{Account, PtyHost};
use relay_verification::delivery::FailureReason;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time::{Duration, Instant, sleep_until, timeout},
};

use super::HandoverError;
use crate::{api::types::Event, events::Hub, process_group::ProcessGroup};

/// Bytes of output in one event.
const CHUNK: usize = 32 << 10;

/// Maximum wait for output behind the end of the program.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Program to run once.
pub(super) struct Run {
    pub(super) agent: String,
    pub(super) program: String,
    pub(super) args: Vec<String>,
    pub(super) environment: BTreeMap<OsString, OsString>,
    pub(super) working_directory: PathBuf,
    /// User as whom it runs, if not the broker's own.
    pub(super) account: Option<Arc<Account>>,
    /// Marks the processes of the run, which end with it.
    pub(super) marker: String,
    /// A program that runs longer is ended: it would keep its agent busy forever.
    pub(super) limit: Duration,
    pub(super) host: PtyHost,
    pub(super) hub: Arc<Hub>,
}

impl Run {
    /// Runs the program to its end. Giving up kills its process group; the caller ends processes that have left the
    /// group.
    pub(super) async fn finish(self) -> Result<(), HandoverError> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).env_clear().envs(&self.environment).current_dir(&self.working_directory);
        // A program that reads its stdin gets the end of it at once instead of a wait for ever.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(account) = &self.account {
            account.apply(command.as_std_mut());
        }
        let ended_at = Instant::now() + self.limit;
        let started = ProcessGroup::start(&mut command, self.marker.clone(), self.host.clone());
        let (mut child, processes) = started.map_err(|error| self.not_started(&error))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let output = async { tokio::join!(self.pass_on("stdout", stdout), self.pass_on("stderr", stderr)) };
        tokio::pin!(output);
        let mut is_read = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break Some(status),
                // Read meanwhile: a program whose pipe is full does not end.
                _ = &mut output, if !is_read => is_read = true,
                () = sleep_until(ended_at) => break None,
            }
        };
        // Children in the background would keep the output open.
        processes.end().await;
        if !is_read && timeout(OUTPUT_TIMEOUT, output).await.is_err() {
            tracing::debug!(agent.name = self.agent, "a process of another program keeps the output open");
        }
        match status {
            Some(Ok(status)) if status.success() => Ok(()),
            Some(Ok(status)) => Err(HandoverError::new(format!("{} has ended with {status}", self.program))),
            Some(Err(error)) => Err(HandoverError::new(format!("the end of {} cannot be seen: {error}", self.program))),
            None => Err(HandoverError {
                reason: FailureReason::RunTimeout,
                problem: format!("{} was ended after {} s", self.program, self.limit.as_secs()),
            }),
        }
    }

    fn not_started(&self, error: &io::Error) -> HandoverError {
        let problem = format!("{} cannot be started: {error}", self.program);
        // Linux takes at most 128 KiB in one argument.
        let is_too_long = error.kind() == io::ErrorKind::ArgumentListTooLong;
        if is_too_long {
            HandoverError { reason: FailureReason::MessageTooLong, problem }
        } else {
            HandoverError::new(problem)
        }
    }

    async fn pass_on(&self, stream: &'static str, output: Option<impl AsyncRead + Unpin>) {
        let Some(mut output) = output else { return };
        let mut buffer = vec![0; CHUNK];
        // Bytes of a character whose rest has not come yet.
        let mut kept = 0;
        while let Ok(count @ 1..) = output.read(&mut buffer[kept..]).await {
            let end = kept + count;
            let whole = end - unfinished(&buffer[..end]);
            if whole > 0 {
                let chunk = String::from_utf8_lossy(&buffer[..whole]).into_owned();
                self.hub.publish(&self.agent, &Event::WorkerStream { stream, chunk });
            }
            buffer.copy_within(whole..end, 0);
            kept = end - whole;
        }
        if kept > 0 {
            let chunk = String::from_utf8_lossy(&buffer[..kept]).into_owned();
            self.hub.publish(&self.agent, &Event::WorkerStream { stream, chunk });
        }
    }
}

/// Length of the unfinished character at the end, at most three bytes.
fn unfinished(bytes: &[u8]) -> usize {
    let is_unfinished = |length: &usize| {
        let tail = std::str::from_utf8(&bytes[bytes.len() - length..]);
        tail.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (1..=bytes.len().min(3)).find(is_unfinished).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_is_not_split() {
        for (bytes, expected) in [
            ("abc".as_bytes(), 0),
            ("né".as_bytes(), 0),
            (&"né".as_bytes()[..2], 1),
            (&"a😀".as_bytes()[..4], 3),
            (&"é😀".as_bytes()[..5], 3),
            (b"\xff", 0),
            (b"", 0),
        ] {
            assert_eq!(unfinished(bytes), expected, "{bytes:?}");
        }
    }
}
