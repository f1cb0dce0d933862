//! `state-<name>.json`: the agents that run, for the broker that follows after a crash.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Mutex, sync::PoisonError};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::write_private_file;
use crate::agents::AgentSpec;

/// Version of the format. A broker reads its own and lower versions.
const VERSION: u32 = 1;

/// Content of the file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct RosterFile {
    version: u32,
    /// `true` after a stop in order, which ends all agents on purpose.
    pub(crate) stopped_cleanly: bool,
    /// Agents by name.
    pub(crate) agents: BTreeMap<String, AgentRecord>,
}

/// One agent that runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct AgentRecord {
    pub(crate) spec: AgentSpec,
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
}

impl Roster {
    /// Opens the file and returns what the previous broker left in it.
    ///
    /// # Errors
    /// If it cannot be read or was written by a newer broker.
    pub(crate) fn open(path: PathBuf) -> Result<(Self, RosterFile)> {
        let previous = match fs::read(&path) {
            Ok(content) => serde_json::from_slice(&content).with_context(|| format!("read {}", path.display()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => RosterFile::default(),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        if previous.version > VERSION {
            bail!(
                "{} has version {}, this broker reads up to {VERSION}: start the newer broker",
                path.display(),
                previous.version
            );
        }
        let content = RosterFile { version: VERSION, ..RosterFile::default() };
        Ok((Self { path, content: Mutex::new(content) }, previous))
    }

    /// Adds or replaces an agent. Blocks for a write to the disk.
    pub(crate) fn put(&self, name: &str, record: AgentRecord) -> Result<()> {
        self.change(|content| {
            content.agents.insert(name.to_owned(), record);
        })
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
        let encoded = serde_json::to_vec(&*content).context("encode the running agents")?;
        write_private_file(&self.path, &encoded).with_context(|| format!("write {}", self.path.display()))
    }
}
