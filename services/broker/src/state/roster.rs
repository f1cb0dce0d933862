//! `state-<name>.json`: the agents that run, for the broker that follows after a crash.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tokio::{sync::Notify, task::spawn_blocking, time::sleep};

use super::{read_versioned, write_versioned};
use crate::{agents::AgentSpec, linux};

/// Version of the format.
const VERSION: u32 = 1;
/// Pause after a change that could not be written, such as on a full disk.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Content of the file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct RosterFile {
    /// `true` after a stop in order, which ends all agents on purpose.
    pub(crate) stopped_cleanly: bool,
    /// Run of the machine in which the processes are known by their ids; absent in files of earlier brokers.
    #[serde(default)]
    pub(crate) boot_id: Option<String>,
    /// Agents by name.
    pub(crate) agents: BTreeMap<String, AgentRecord>,
}

/// One agent that runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct AgentRecord {
    pub(crate) spec: AgentSpec,
    /// Empty as long as the agent is not bound at the engine.
    pub(crate) agent_id: String,
    /// Value of the marker variable in the environment of its processes.
    pub(crate) marker: String,
    pub(crate) pid: i32,
    pub(crate) start_ticks: u64,
    /// `true` once its task was typed, so that a restart in the same session does not repeat it.
    pub(crate) task_typed: bool,
}

/// The running agents, written with each change.
#[derive(Debug)]
pub(crate) struct Roster {
    path: PathBuf,
    content: Mutex<RosterFile>,
    /// The file lacks a change.
    unwritten: Notify,
}

impl Roster {
    /// Opens the file and returns what the previous broker left in it.
    ///
    /// # Errors
    /// If it cannot be read or was written by a newer broker.
    pub(crate) fn open(path: PathBuf) -> Result<(Self, RosterFile)> {
        let previous: RosterFile = read_versioned(&path, VERSION)?.unwrap_or_default();
        let content = Mutex::new(RosterFile { boot_id: linux::boot_id(), ..RosterFile::default() });
        Ok((Self { path, content, unwritten: Notify::new() }, previous))
    }

    /// Keeps agents of the previous broker until each was started again or given up: this broker may be killed before.
    pub(crate) fn keep(&self, agents: BTreeMap<String, AgentRecord>) {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).agents = agents;
    }

    /// Adds or replaces an agent. In the session of the one that it replaces, its task stays typed. Blocks for a write
    /// to the disk.
    pub(crate) fn put(&self, name: &str, mut record: AgentRecord) -> Result<()> {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        record.task_typed |=
            content.agents.get(name).is_some_and(|before| before.task_typed && record.is_in_session_of(before));
        if let Some(before) = content.agents.get(name).filter(|_| record.agent_id.is_empty()) {
            // It may have been bound in the meantime.
            record.agent_id.clone_from(&before.agent_id);
        }
        let before = content.agents.insert(name.to_owned(), record);
        let written = self.write(&content);
        if written.is_err() {
            // An agent that was refused must not reach the disk with a later change.
            match before {
                Some(record) => content.agents.insert(name.to_owned(), record),
                None => content.agents.remove(name),
            };
        }
        written
    }

    /// Writes changes that could not be written at once: an agent that was released must not run again after a crash.
    pub(crate) async fn keep_written(self: Arc<Self>) {
        loop {
            self.unwritten.notified().await;
            sleep(RETRY_PAUSE).await;
            let roster = self.clone();
            // Another failure notifies again, so this is repeated until the disk takes it.
            if let Ok(Ok(())) = spawn_blocking(move || roster.change(|_| {})).await {
                tracing::info!("the list of running agents is stored again");
            }
        }
    }

    /// Removes an agent. Blocks for a write to the disk.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.change(|content| {
            content.agents.remove(name);
        })
    }

    /// Notes that an agent's task was typed. Blocks for a write to the disk.
    pub(crate) fn mark_task_typed(&self, name: &str) -> Result<()> {
        self.change(|content| {
            if let Some(record) = content.agents.get_mut(name) {
                record.task_typed = true;
            }
        })
    }

    /// Notes the id of an agent that is bound after its start. Blocks for a write to the disk.
    pub(crate) fn set_agent_id(&self, name: &str, agent_id: String) -> Result<()> {
        self.change(|content| {
            if let Some(record) = content.agents.get_mut(name) {
                record.agent_id = agent_id;
            }
        })
    }

    /// Notes the channels that an agent is in, for its next start. Blocks for a write to the disk.
    pub(crate) fn set_channels(&self, name: &str, channels: Vec<String>) -> Result<()> {
        self.change(|content| {
            if let Some(record) = content.agents.get_mut(name) {
                record.spec.channels = channels;
            }
        })
    }

    /// Notes a stop in order and keeps the agents for `--resume`. Blocks for a write to the disk.
    pub(crate) fn stop(&self, agents: BTreeMap<String, AgentRecord>) -> Result<()> {
        self.change(|content| {
            content.stopped_cleanly = true;
            content.agents = agents;
        })
    }

    /// The agents now.
    pub(crate) fn agents(&self) -> BTreeMap<String, AgentRecord> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).agents.clone()
    }

    fn change(&self, change: impl FnOnce(&mut RosterFile)) -> Result<()> {
        // Held during the write, so that an older content never replaces a newer one.
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut content);
        self.write(&content).inspect_err(|_| self.unwritten.notify_one())
    }

    fn write(&self, content: &RosterFile) -> Result<()> {
        write_versioned(&self.path, VERSION, content)
    }
}

impl AgentRecord {
    /// Returns whether the agent resumes the session that `before` has left.
    fn is_in_session_of(&self, before: &Self) -> bool {
        self.spec.is_resumable && self.spec.session_id.is_some() && self.spec.session_id == before.spec.session_id
    }
}

impl RosterFile {
    /// Returns whether the machine was started again since, so that ids of processes name strangers.
    pub(crate) fn is_of_earlier_boot(&self) -> bool {
        let now = linux::boot_id();
        self.boot_id.is_some() && now.is_some() && self.boot_id != now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pid: i32) -> AgentRecord {
        let spec = AgentSpec::default();
        AgentRecord { spec, agent_id: "7".into(), marker: "m".into(), pid, start_ticks: 1, task_typed: false }
    }

    #[test]
    fn processes_of_an_earlier_boot_are_strangers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        let (roster, _) = Roster::open(path.clone()).expect("a roster");
        roster.put("ada", record(1)).expect("an agent");
        let (_, mut previous) = Roster::open(path).expect("a roster");
        assert!(!previous.is_of_earlier_boot());
        previous.boot_id = Some("another".to_owned());
        assert!(previous.is_of_earlier_boot());
        previous.boot_id = None;
        assert!(!previous.is_of_earlier_boot(), "an earlier broker has written the file");
    }

    #[test]
    fn a_known_id_stays_when_a_program_is_started_again_unbound() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        let (roster, _) = Roster::open(path.clone()).expect("a roster");
        let unbound = || AgentRecord { agent_id: String::new(), ..record(1) };
        roster.put("ada", unbound()).expect("an agent");
        roster.set_agent_id("ada", "8".to_owned()).expect("an id");
        roster.put("ada", unbound()).expect("the agent again");
        roster.set_agent_id("nobody", "9".to_owned()).expect("no change");
        let (_, previous) = Roster::open(path).expect("a roster");
        assert_eq!(previous.agents["ada"].agent_id, "8");
        assert_eq!(previous.agents.len(), 1);
    }

    #[test]
    fn a_task_stays_typed_in_a_session_that_is_resumed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        let in_session = |session: Option<&str>, is_resumable: bool| {
            let spec = AgentSpec { session_id: session.map(str::to_owned), is_resumable, ..AgentSpec::default() };
            AgentRecord { spec, ..record(1) }
        };
        for (first, second, stays) in [
            ((Some("a"), true), (Some("a"), true), true),
            ((Some("a"), true), (Some("b"), true), false),
            ((Some("a"), false), (Some("a"), false), false),
            ((None, true), (None, true), false),
        ] {
            let (roster, _) = Roster::open(path.clone()).expect("a roster");
            roster.put("ada", in_session(first.0, first.1)).expect("an agent");
            assert!(!roster.agents()["ada"].task_typed);
            roster.mark_task_typed("ada").expect("a note");
            roster.put("ada", in_session(second.0, second.1)).expect("the agent again");
            let (_, previous) = Roster::open(path.clone()).expect("a roster");
            assert_eq!(previous.agents["ada"].task_typed, stays, "{first:?} {second:?}");
        }
    }

    #[test]
    fn an_agent_that_could_not_be_stored_is_not_stored_with_the_next_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state/state.json");
        let (roster, _) = Roster::open(path.clone()).expect("a roster");
        roster.put("ada", record(1)).expect_err("the folder is missing");
        std::fs::create_dir(folder.path().join("state")).expect("a folder");
        roster.put("bob", record(2)).expect("an agent");
        let (_, previous) = Roster::open(path).expect("a roster");
        assert_eq!(previous.agents.into_keys().collect::<Vec<_>>(), ["bob"]);
    }

    #[tokio::test]
    async fn an_end_that_could_not_be_stored_is_stored_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("state");
        std::fs::create_dir(&state).expect("a folder");
        let (roster, _) = Roster::open(state.join("state.json")).expect("a roster");
        roster.put("ada", record(1)).and_then(|()| roster.put("bob", record(2))).expect("two agents");
        let (roster, away) = (Arc::new(roster), folder.path().join("away"));
        std::fs::rename(&state, &away).expect("no folder");
        roster.remove("ada").expect_err("the folder is missing");
        std::fs::rename(&away, &state).expect("the folder again");
        let writer = tokio::spawn(roster.keep_written());
        let written = async {
            loop {
                let (_, previous) = Roster::open(state.join("state.json")).expect("a roster");
                if previous.agents.into_keys().eq(["bob"]) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), written).await.expect("the end is stored");
        writer.abort();
    }

    #[test]
    fn agents_that_are_not_started_again_yet_outlive_another_crash() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        let (roster, _) = Roster::open(path.clone()).expect("a roster");
        roster.put("ada", record(1)).and_then(|()| roster.put("bob", record(2))).expect("two agents");
        let (roster, previous) = Roster::open(path.clone()).expect("a roster");
        roster.keep(previous.agents);
        roster.put("ada", record(3)).expect("one is started again");
        let (roster, previous) = Roster::open(path.clone()).expect("a roster");
        assert_eq!(previous.agents.values().map(|record| record.pid).collect::<Vec<_>>(), [3, 2]);
        roster.put("ada", record(4)).expect("an agent");
        let (_, previous) = Roster::open(path).expect("a roster");
        assert_eq!(previous.agents.len(), 1, "nothing is kept that was not asked for");
    }
}
