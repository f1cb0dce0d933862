//! The search for ack files of messages that wait for them.

use relay_verification::Timestamp;
use tokio::time::Duration;

use super::{
    AgentTask, ProgramRun,
    run::{AckFileContent, JobResult},
};
use crate::agents::ack_files::AckFolder;

/// Interval of ack-file scans while an ack is expected.
const ACK_FILES_EVERY: Duration = Duration::from_millis(200);
/// Interval of the sweep of stale ack files.
const ACK_SWEEP_EVERY: Duration = Duration::from_secs(15 * 60);

impl AgentTask {
    pub(super) fn look_for_ack_files(&self, running: &mut ProgramRun, now: Timestamp) {
        let Some(folder) = &self.launch.ack_folder else { return };
        if now >= running.ack_sweep_due {
            running.ack_sweep_due = now + ACK_SWEEP_EVERY;
            let folder = folder.clone();
            self.launch.services.tasks.spawn_blocking(move || folder.sweep());
        }
        // One search at a time, so that a slow disk does not pile them up.
        if running.is_reading_ack_files || now < running.ack_files_due {
            return;
        }
        let awaited = awaited_files(running);
        if awaited.is_empty() {
            return;
        }
        running.is_reading_ack_files = true;
        running.ack_files_due = now + ACK_FILES_EVERY;
        running.works.push(Box::pin(read_files(folder.clone(), awaited)));
    }

    /// Takes the acks that the program has written right before its end. None of its processes is left to write more.
    pub(super) async fn read_last_acks(&self, running: &mut ProgramRun) {
        let Some(folder) = &self.launch.ack_folder else { return };
        let awaited = awaited_files(running);
        if !awaited.is_empty() {
            let done = read_files(folder.clone(), awaited).await;
            self.on_done(running, done);
        }
    }

    /// Removes a file that was accepted. The end of the program waits for it, since it removes the empty folder.
    fn remove_ack_file(&self, running: &ProgramRun, path: String) {
        if let Some(folder) = self.launch.ack_folder.clone() {
            running.works.push(Box::pin(async move {
                // A file that stays is swept later.
                let _ = tokio::task::spawn_blocking(move || folder.remove(&path)).await;
                JobResult::AckFileRemoved
            }));
        }
    }

    /// Takes ack files that were found.
    pub(super) fn on_ack_files(&self, running: &mut ProgramRun, files: Vec<AckFileContent>) {
        running.is_reading_ack_files = false;
        let now = running.tick();
        for AckFileContent { key, path, content } in files {
            match running.pipeline.on_ack_file(key, now, &path, &content) {
                Ok(effects) => {
                    self.perform(running, effects);
                    self.remove_ack_file(running, path);
                }
                Err(rejection) => {
                    tracing::debug!(agent.name = self.name(), reason = rejection.as_str(), "an ack file is refused");
                }
            }
        }
    }
}

/// Messages that wait for an ack file, with its path.
fn awaited_files(running: &ProgramRun) -> Vec<(u64, String)> {
    running.pipeline.awaited_files().filter_map(|(key, file)| Some((key, file.path()?.to_owned()))).collect()
}

async fn read_files(folder: AckFolder, awaited: Vec<(u64, String)>) -> JobResult {
    let read = move || {
        let found = awaited.into_iter().filter_map(|(key, path)| {
            let content = folder.read(&path)?;
            Some(AckFileContent { key, path, content })
        });
        found.collect()
    };
    // A read that panicked has found nothing.
    JobResult::AckFiles(tokio::task::spawn_blocking(read).await.unwrap_or_default())
}
