//! [`VerificationBook`]: what was learned of each agent program and version, and the figures of their deliveries. Kept
//! over restarts in `verification-<name>.json`.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, UNIX_EPOCH},
};

use anyhow::Result;
use relay_verification::strategy::{DeliveryRecord, Learned, SHORT_ECHO_WINDOW};
use serde::{Deserialize, Serialize};
use tokio::{sync::Notify, time::sleep};

use super::figures::{Outcome, VerificationFigures};
use crate::{
    api::types::{ProgramReport, VerificationReport},
    clock, metric_names,
    state::{read_versioned, write_versioned},
};

/// Version of the file.
const VERSION: u32 = 1;
/// Minimum interval of writes of the file.
const WRITE_EVERY: Duration = Duration::from_secs(5);
/// Maximum number of versions of programs that are remembered.
const MAX_ENTRIES: usize = 200;

/// Agent program in one version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ProgramVersion {
    pub(crate) harness: String,
    /// Size and time of change of the program's file: asking each program for its version would start it.
    pub(crate) version: String,
}

impl ProgramVersion {
    /// The version of a program found on `PATH` or by its path. Blocks.
    pub(crate) fn find(harness: &str, program: &str) -> Self {
        let facts = find_program(program).and_then(|path| path.metadata().ok());
        let version = facts.map(|facts| {
            // Without a time of change the size alone tells versions apart.
            let changed = facts.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            format!("{}-{}", facts.len(), changed.unwrap_or_default().as_secs())
        });
        Self { harness: harness.to_owned(), version: version.unwrap_or_else(|| "unknown".to_owned()) }
    }
}

fn find_program(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Entry {
    learned: Learned,
    figures: VerificationFigures,
    /// Unix time of the last outcome, in milliseconds.
    used_ms: i64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct File {
    entries: Vec<(ProgramVersion, Entry)>,
}

#[derive(Debug, Default)]
struct Content {
    programs: BTreeMap<ProgramVersion, Entry>,
    /// Figures of agents that run.
    agents: BTreeMap<String, VerificationFigures>,
}

/// All programs and running agents.
#[derive(Debug)]
pub(crate) struct VerificationBook {
    path: PathBuf,
    content: Mutex<Content>,
    changed: Notify,
    /// Held during a write of the file.
    writing: Mutex<()>,
}

impl VerificationBook {
    /// Reads what the previous broker has learned.
    ///
    /// # Errors
    /// If the file cannot be read, or a newer broker has written it.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let file: File = read_versioned(&path, VERSION)?.unwrap_or_default();
        for (program, entry) in &file.entries {
            show_learned(&program.harness, &entry.learned);
        }
        let content = Content { programs: file.entries.into_iter().collect(), agents: BTreeMap::new() };
        Ok(Self { path, content: Mutex::new(content), changed: Notify::new(), writing: Mutex::default() })
    }

    /// Returns the conclusions about a program so far.
    pub(crate) fn learned(&self, program: &ProgramVersion) -> Learned {
        self.lock().programs.get(program).map(|entry| entry.learned.clone()).unwrap_or_default()
    }

    /// Takes an outcome.
    pub(crate) fn on_outcome(&self, agent: &str, program: &ProgramVersion, outcome: Outcome, attempts: u32) {
        self.change(agent, program, |figures| figures.on_outcome(outcome, attempts));
    }

    /// A message was not typed again.
    pub(crate) fn on_suppressed(&self, agent: &str, program: &ProgramVersion, reason: &'static str) {
        self.change(agent, program, |figures| figures.on_suppressed(reason));
    }

    /// Takes the signals of a delivery and returns what is learned of the program now.
    pub(crate) fn on_record(&self, agent: &str, program: &ProgramVersion, record: DeliveryRecord) -> Learned {
        self.change(agent, program, |figures| figures.on_record(record));
        let mut content = self.lock();
        let entry = content.programs.entry(program.clone()).or_default();
        let changes = entry.learned.record(record);
        for change in &changes {
            tracing::info!(harness = program.harness, ?change, "learned of an agent program");
        }
        if !changes.is_empty() {
            show_learned(&program.harness, &entry.learned);
        }
        entry.learned.clone()
    }

    fn change(&self, agent: &str, program: &ProgramVersion, change: impl Fn(&mut VerificationFigures)) {
        let mut content = self.lock();
        if !content.programs.contains_key(program) && content.programs.len() >= MAX_ENTRIES {
            let unused = content.programs.iter().min_by_key(|(_, entry)| entry.used_ms);
            if let Some(unused) = unused.map(|(program, _)| program.clone()) {
                content.programs.remove(&unused);
            }
        }
        let entry = content.programs.entry(program.clone()).or_default();
        entry.used_ms = clock::unix_ms();
        change(&mut entry.figures);
        change(content.agents.entry(agent.to_owned()).or_default());
        self.changed.notify_one();
    }

    /// An agent has ended.
    pub(crate) fn forget_agent(&self, agent: &str) {
        self.lock().agents.remove(agent);
    }

    /// Forgets what was learned of a program, or of all.
    pub(crate) fn reset(&self, harness: Option<&str>) -> usize {
        let mut content = self.lock();
        let before = content.programs.len();
        content.programs.retain(|program, _| {
            let stays = harness.is_some_and(|harness| harness != program.harness);
            if !stays {
                show_learned(&program.harness, &Learned::new());
            }
            stays
        });
        self.changed.notify_one();
        before - content.programs.len()
    }

    /// Figures of all programs.
    pub(crate) fn report(&self) -> Vec<ProgramReport> {
        let content = self.lock();
        let reports = content.programs.iter().map(|(program, entry)| ProgramReport {
            harness: program.harness.clone(),
            version: program.version.clone(),
            figures: entry.figures.report(Some(&entry.learned)),
        });
        reports.collect()
    }

    /// Figures of one running agent, if it got a message.
    pub(crate) fn report_agent(&self, agent: &str) -> Option<VerificationReport> {
        self.lock().agents.get(agent).map(|figures| figures.report(None))
    }

    /// Writes the file after changes, without an end.
    pub(crate) async fn keep_written(self: std::sync::Arc<Self>) {
        loop {
            self.changed.notified().await;
            // Changes in this time go into the same write.
            sleep(WRITE_EVERY).await;
            let book = self.clone();
            if let Ok(Err(error)) = tokio::task::spawn_blocking(move || book.write()).await {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "failed to store verification statistics, they are kept in memory"
                );
            }
        }
    }

    /// Writes the file. Blocks.
    pub(crate) fn write(&self) -> Result<()> {
        // A write that has begun goes on when the task that waits for it is aborted, beside the last write of a stop.
        // Before the content is read, so that an older one never replaces a newer one.
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // Copied out of the lock, which the tasks of agents take with each outcome. The disk may be slow.
        let entries = self.lock().programs.iter().map(|(program, entry)| (program.clone(), entry.clone())).collect();
        write_versioned(&self.path, VERSION, &File { entries })
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows the conclusions about the version of a program that was used last.
fn show_learned(harness: &str, learned: &Learned) {
    let has_short_window = learned.echo_window() == SHORT_ECHO_WINDOW;
    for (what, holds) in [("echo_unreliable", !learned.is_echo_reliable()), ("short_echo_window", has_short_window)] {
        let labels = [("harness", harness.to_owned()), ("what", what.to_owned())];
        metrics::gauge!(metric_names::LEARNED, &labels).set(f64::from(u8::from(holds)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_version_is_evicted() {
        let folder = tempfile::tempdir().expect("a folder");
        let book = VerificationBook::open(folder.path().join("verification.json")).expect("a book");
        let version = |number: usize| ProgramVersion { harness: "claude".to_owned(), version: format!("{number:03}") };
        for number in 0..MAX_ENTRIES {
            book.on_outcome("ada", &version(number), Outcome::Unverified, 1);
        }
        // The first by name was used last.
        for (age, entry) in book.lock().programs.values_mut().rev().enumerate() {
            entry.used_ms = i64::try_from(age).expect("a small number");
        }
        let other = ProgramVersion { harness: "zeta".to_owned(), version: "1".to_owned() };
        book.on_outcome("ada", &other, Outcome::Unverified, 1);
        let content = book.lock();
        assert!(content.programs.contains_key(&other) && content.programs.contains_key(&version(0)));
        assert!(!content.programs.contains_key(&version(MAX_ENTRIES - 1)));
        assert_eq!(content.programs.len(), MAX_ENTRIES);
    }

    #[test]
    fn writes_at_the_same_time_leave_the_newest_figures_in_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let book = VerificationBook::open(folder.path().join("verification.json")).expect("a book");
        std::thread::scope(|scope| {
            for harness in ["claude", "codex", "gemini", "opencode"] {
                let book = &book;
                scope.spawn(move || {
                    let program = ProgramVersion { harness: harness.to_owned(), version: "1".to_owned() };
                    for _ in 0..10 {
                        book.on_outcome("ada", &program, Outcome::Unverified, 1);
                        book.write().expect("a file");
                    }
                });
            }
        });
        let again = VerificationBook::open(book.path.clone()).expect("a book");
        assert_eq!(again.report(), book.report());
    }

    #[test]
    fn verification_statistics_outlive_the_broker_and_can_be_reset() {
        let folder = tempfile::tempdir().expect("a folder");
        let book = VerificationBook::open(folder.path().join("verification.json")).expect("a book");
        let program = ProgramVersion::find("claude", "/bin/sh");
        assert_ne!(program.version, "unknown");
        let silent = DeliveryRecord { has_file_ack: true, ..DeliveryRecord::default() };
        for _ in 0..20 {
            book.on_outcome("ada", &program, Outcome::Verified { method: "file", latency_ms: 7 }, 1);
            book.on_record("ada", &program, silent);
        }
        assert!(!book.learned(&program).is_echo_reliable());
        book.write().expect("a file");
        let again = VerificationBook::open(book.path.clone()).expect("a book");
        assert_eq!(again.learned(&program), book.learned(&program));
        assert_eq!(again.report(), book.report());
        assert!(again.report_agent("ada").is_none(), "agents end with their broker");
        assert_eq!((again.reset(Some("codex")), again.reset(Some("claude"))), (0, 1));
        assert!(again.learned(&program).is_echo_reliable());
    }
}
