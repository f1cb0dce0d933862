//! [`LocalState`]: all that is read from the state directory before anything listens.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use relay_pty::{Account, HostSettings, PtyHost};

use crate::{
    agents::MARKER,
    cli::Init,
    harness::HarnessTable,
    insight::{CrashLog, VerificationBook},
    restore::{self, RestorableAgent},
    state::{Ledger, LedgerTask, Persistence, ProjectFiles, Roster, StateDirectory},
};

/// State of the broker on this machine.
pub(super) struct LocalState {
    pub(super) instance: String,
    pub(super) working_directory: PathBuf,
    pub(super) harnesses: Arc<HarnessTable>,
    pub(super) host: PtyHost,
    /// User as whom agents run, if not the broker's own.
    pub(super) account: Option<Arc<Account>>,
    pub(super) roster: Arc<Roster>,
    pub(super) project_files: Arc<ProjectFiles>,
    pub(super) ledger: Ledger,
    pub(super) verification: Arc<VerificationBook>,
    pub(super) crashes: Arc<CrashLog>,
    /// Agents of the previous broker that are started again.
    pub(super) restorable_agents: Vec<RestorableAgent>,
}

impl LocalState {
    /// Reads the files, and ends what the previous broker has left running. Blocks while it reads: nothing else runs
    /// yet.
    pub(super) async fn open(
        settings: &Init,
        working_directory: PathBuf,
        directory: &StateDirectory,
    ) -> Result<(Self, LedgerTask)> {
        let instance = instance_name(settings, &working_directory);
        let account = account(settings)?;
        let harnesses = Arc::new(HarnessTable::read(settings.harnesses.as_deref())?);
        let (roster, previous) = Roster::open(directory.file("state", &instance, "json"))?;
        let (ledger, ledger_task) = LedgerTask::open(directory.file("ledger", &instance, "jsonl"))?;
        let verification = VerificationBook::open(directory.file("verification", &instance, "json"))?;
        let crashes = CrashLog::open(directory.path().join("crash-insights.json"))?;
        let host = PtyHost::new(HostSettings::new(MARKER)).context("prepare for terminals")?;
        // After the reads above: a file of a newer broker ends the start before any of its agents is touched.
        restore::end_leftovers(&host, &previous).await?;
        // Restored after the leftovers have ended: their programs may read the entries until then.
        let project_files = ProjectFiles::open(directory.file("project-files", &instance, "json"), account.clone())?;
        let restorable_agents = match directory.persistence() {
            // A graceful shutdown has ended the agents on purpose; they are in the file for `--resume` only.
            Persistence::Kept if settings.resume || !previous.stopped_cleanly => {
                restore::restorable_agents(previous, &ledger_task, &roster)
            }
            Persistence::Kept | Persistence::Removed => {
                restore::remove_acks(&previous, &working_directory, account.as_ref());
                Vec::new()
            }
        };
        let state = Self {
            instance,
            working_directory,
            harnesses,
            host,
            account,
            roster: Arc::new(roster),
            project_files: Arc::new(project_files),
            ledger,
            verification: Arc::new(verification),
            crashes: Arc::new(crashes),
            restorable_agents,
        };
        Ok((state, ledger_task))
    }
}

/// The user of `--run-as`, unless the broker runs as that one anyway.
fn account(settings: &Init) -> Result<Option<Arc<Account>>> {
    let Some(name) = settings.run_as.as_deref().filter(|name| !name.is_empty()) else { return Ok(None) };
    let found = Account::find(name).with_context(|| format!("look up the user {name} of --run-as"))?;
    let account = found.with_context(|| format!("--run-as: there is no user {name} on this machine"))?;
    ensure!(
        account.is_allowed(),
        "--run-as {name}: only a broker that root has started can run agents as another user"
    );
    Ok((!account.is_own()).then(|| Arc::new(account)))
}

fn instance_name(settings: &Init, working_directory: &Path) -> String {
    let given = settings.instance_name.clone().filter(|name| !name.trim().is_empty());
    // The root directory has no name.
    let base = || working_directory.file_name().map(|name| name.to_string_lossy().into_owned());
    given.or_else(base).unwrap_or_else(|| "broker".to_owned())
}
