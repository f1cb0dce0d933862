//! `ledger-<name>`: the messages that are known to have reached an agent's session, one JSON object a line, written
//! before the ack that rests on them is sent. After a crash, messages that the session has already are acknowledged
//! without being typed again. The first line is the version of the format; a file without it predates versioning.

use std::{
    collections::{HashMap, VecDeque},
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::PathBuf,
};

use anyhow::{Context as _, Result};
use relay_verification::Level;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
};

use super::{refuse_newer, write_private_file};

/// Version of the format.
const VERSION: u32 = 1;
/// Messages remembered for one agent.
const REMEMBERED: usize = 512;
/// Maximum number of messages remembered for all agents, about 10 MB. Beyond it the least recently used agents are
/// evicted: their mailboxes have moved on.
const MAX_REMEMBERED: usize = 65_536;
/// Entries that wait to be written. Agents wait for room beyond it.
const QUEUE: usize = 1024;
/// Entries written with one synchronisation of the disk.
const BATCH: usize = 256;
/// Number of lines beyond the remembered ones after which the file is rewritten.
const SURPLUS_LINES: usize = 8192;

/// A message that reached an agent's session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LedgerEntry {
    pub(crate) agent_id: String,
    pub(crate) msg_id: String,
    pub(crate) level: Level,
    /// Session that has it; a process without one ends with the broker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session_ref: Option<String>,
}

/// First line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    version: u32,
}

/// Handle for recording. Clones are the same ledger.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    requests: mpsc::Sender<(LedgerEntry, oneshot::Sender<()>)>,
}

impl Ledger {
    /// Entries that wait to be written.
    pub(crate) fn waiting(&self) -> usize {
        self.requests.max_capacity() - self.requests.capacity()
    }

    /// Records an entry and waits until the disk has it. `false` if it could not be written, so that the ack must wait.
    pub(crate) async fn record(&self, entry: LedgerEntry) -> bool {
        let (written, wait) = oneshot::channel();
        self.requests.send((entry, written)).await.is_ok() && wait.await.is_ok()
    }
}

/// The task that writes the ledger. Runs until the last handle is dropped.
#[derive(Debug)]
pub(crate) struct LedgerTask {
    path: PathBuf,
    requests: mpsc::Receiver<(LedgerEntry, oneshot::Sender<()>)>,
    remembered: NewestEntries,
    /// Lines that another broker has written and this one cannot use. They stay in the file.
    foreign: Vec<Vec<u8>>,
    lines: usize,
    /// The last line may be incomplete: the disk was full.
    is_torn: bool,
}

impl LedgerTask {
    /// Reads the ledger of the previous broker. A line that a crash cut off is left out.
    ///
    /// # Errors
    /// If it cannot be read or written, or a newer broker has written it.
    pub(crate) fn open(path: PathBuf) -> Result<(Ledger, Self)> {
        let (sender, requests) = mpsc::channel(QUEUE);
        let mut task = Self {
            path,
            requests,
            remembered: NewestEntries::default(),
            foreign: Vec::new(),
            lines: 0,
            is_torn: false,
        };
        task.read()?;
        // At each start: lines that were cut off are left out, and a file without a version gets one.
        task.rewrite().with_context(|| format!("write {}", task.path.display()))?;
        Ok((Ledger { requests: sender }, task))
    }

    fn read(&mut self) -> Result<()> {
        let reading = || format!("read {}", self.path.display());
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error).with_context(reading),
        };
        let mut cut_off = 0;
        // As bytes: a crash may cut a line within a character.
        for (number, line) in BufReader::new(file).split(b'\n').enumerate() {
            let line = line.with_context(reading)?;
            if number == 0 {
                refuse_newer(&self.path, &line, VERSION)?;
            }
            if let Ok(entry) = serde_json::from_slice::<LedgerEntry>(&line) {
                self.remembered.add(entry);
            } else if serde_json::from_slice::<IgnoredAny>(&line).is_err() {
                cut_off += usize::from(!line.is_empty());
            } else if number > 0 || serde_json::from_slice::<Header>(&line).is_err() {
                self.foreign.push(line);
            }
        }
        if cut_off > 0 || !self.foreign.is_empty() {
            let foreign = self.foreign.len();
            tracing::warn!(cut_off, foreign, "lines of the ledger are not understood, their messages may be repeated");
        }
        Ok(())
    }

    /// Messages that a session has already.
    pub(crate) fn known_messages(&self, agent_id: &str, session_ref: &str) -> Vec<String> {
        let entries = self.remembered.agents.get(agent_id).into_iter().flat_map(|agent| &agent.entries);
        entries
            .filter(|entry| entry.session_ref.as_deref() == Some(session_ref) && entry.level >= Level::Echoed)
            .map(|entry| entry.msg_id.clone())
            .collect()
    }

    /// Writes entries as they come, many with one synchronisation.
    pub(crate) async fn run(mut self) {
        let mut batch = Vec::new();
        while self.requests.recv_many(&mut batch, BATCH).await > 0 {
            let entries = std::mem::take(&mut batch);
            let written = spawn_blocking(move || {
                let result = self.append(&entries);
                (self, entries, result)
            });
            // The write has panicked. The end of this task stops the broker, which cannot acknowledge anything without
            // the ledger.
            let Ok((task, entries, result)) = written.await else { return };
            self = task;
            match result {
                Ok(()) => entries.into_iter().for_each(|(_, written)| {
                    // The agent may have ended meanwhile.
                    let _ = written.send(());
                }),
                // The senders are dropped: each agent records its entry again after a pause.
                Err(error) => tracing::error!(%error, "the ledger cannot be written, acks wait"),
            }
        }
    }

    fn append(&mut self, entries: &[(LedgerEntry, oneshot::Sender<()>)]) -> io::Result<()> {
        let mut lines = Vec::new();
        // Ends the torn line, which would otherwise swallow the first entry.
        if self.is_torn {
            lines.push(b'\n');
        }
        for (entry, _) in entries {
            serde_json::to_writer(&mut lines, entry)?;
            lines.push(b'\n');
        }
        // Opened for each batch, since a rewrite puts another file in its place.
        let mut file = OpenOptions::new().create(true).append(true).mode(0o600).open(&self.path)?;
        // Until the disk has all of it: a full one may take a part of a line.
        self.is_torn = true;
        file.write_all(&lines)?;
        file.sync_data()?;
        self.is_torn = false;
        self.lines += entries.len();
        for (entry, _) in entries {
            self.remembered.add(entry.clone());
        }
        // Rarely, so that its cost is spread over thousands of entries.
        if self.lines > self.remembered.count + SURPLUS_LINES
            && let Err(error) = self.rewrite()
        {
            // The batch is on the disk: recorded again, it would evict older entries.
            tracing::warn!(%error, "the ledger cannot be rewritten, it grows until the next attempt");
        }
        Ok(())
    }

    fn rewrite(&mut self) -> io::Result<()> {
        let mut content = serde_json::to_vec(&Header { version: VERSION })?;
        content.push(b'\n');
        for line in &self.foreign {
            content.extend_from_slice(line);
            content.push(b'\n');
        }
        self.lines = 0;
        for entry in self.remembered.by_age() {
            serde_json::to_writer(&mut content, entry)?;
            content.push(b'\n');
            self.lines += 1;
        }
        write_private_file(&self.path, &content)
    }
}

/// The newest entries, by agent.
#[derive(Debug, Default)]
struct NewestEntries {
    agents: HashMap<String, AgentEntries>,
    /// Entries of all agents.
    count: usize,
    /// Entries that were ever added.
    added: u64,
}

#[derive(Debug, Default)]
struct AgentEntries {
    entries: VecDeque<LedgerEntry>,
    /// Number of the last one among all entries.
    last: u64,
}

impl NewestEntries {
    fn add(&mut self, entry: LedgerEntry) {
        self.added += 1;
        self.count += 1;
        let agent = self.agents.entry(entry.agent_id.clone()).or_default();
        agent.last = self.added;
        agent.entries.push_back(entry);
        if agent.entries.len() > REMEMBERED {
            agent.entries.pop_front();
            self.count -= 1;
        }
        while self.count > MAX_REMEMBERED
            && let Some(oldest) = self.agents.iter().min_by_key(|(_, agent)| agent.last).map(|(id, _)| id.clone())
        {
            self.count -= self.agents.remove(&oldest).map_or(0, |agent| agent.entries.len());
        }
    }

    /// All entries, those of the least recently used agent first.
    fn by_age(&self) -> impl Iterator<Item = &LedgerEntry> {
        let mut agents: Vec<&AgentEntries> = self.agents.values().collect();
        agents.sort_unstable_by_key(|agent| agent.last);
        agents.into_iter().flat_map(|agent| &agent.entries)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    const ENTRY: &str = r#"{"agent_id":"7","msg_id":"1","level":"L1","session_ref":"s"}"#;

    fn lines(path: &Path) -> Vec<String> {
        fs::read_to_string(path).expect("a file").lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_file_without_a_version_is_read_and_gets_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        fs::write(&path, format!("{ENTRY}\n")).expect("room");
        for _ in 0..2 {
            let (_, task) = LedgerTask::open(path.clone()).expect("a ledger");
            assert_eq!(task.known_messages("7", "s"), ["1"]);
            assert_eq!(lines(&path), [r#"{"version":1}"#, ENTRY]);
        }
    }

    #[test]
    fn a_file_of_a_newer_broker_is_refused_and_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        for header in [r#"{"version":2}"#, r#"{"version":18446744073709551615,"shape":["any"]}"#] {
            let content = format!("{header}\n{ENTRY}\n[\"newer\"]\n");
            fs::write(&path, &content).expect("room");
            let refused = format!("{:#}", LedgerTask::open(path.clone()).expect_err("a newer file"));
            assert!(refused.contains("ledger has version") && refused.contains("reads up to 1"), "{refused}");
            assert_eq!(fs::read_to_string(&path).expect("a file"), content);
        }
    }

    #[test]
    fn whole_lines_that_are_not_understood_stay_and_cut_off_ones_go() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        let foreign = r#"{"agent_id":"7","msg_id":"2","level":"L9"}"#;
        // A full disk leaves a cut off line in front of whole ones.
        let content = format!("{{\"version\":1}}\n{foreign}\n{{\"agent\n{ENTRY}\n{{\"agent_id\":");
        fs::write(&path, content).expect("room");
        for _ in 0..2 {
            let (_, task) = LedgerTask::open(path.clone()).expect("a ledger");
            assert_eq!(task.known_messages("7", "s"), ["1"]);
            assert_eq!(lines(&path), [r#"{"version":1}"#, foreign, ENTRY]);
        }
    }

    #[test]
    fn the_least_recently_used_agents_are_evicted_also_over_a_restart() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        let (_, mut task) = LedgerTask::open(path.clone()).expect("a ledger");
        let entry = |agent: usize, message: usize| LedgerEntry {
            agent_id: agent.to_string(),
            msg_id: message.to_string(),
            level: Level::Echoed,
            session_ref: Some("s".into()),
        };
        let agents = MAX_REMEMBERED / REMEMBERED;
        for agent in 0..agents {
            (0..REMEMBERED).for_each(|message| task.remembered.add(entry(agent, message)));
        }
        // The first agent is the one that got a message last.
        task.remembered.add(entry(0, REMEMBERED));
        assert_eq!(task.remembered.count, MAX_REMEMBERED);
        task.rewrite().expect("a file");
        let (_, mut task) = LedgerTask::open(path).expect("a ledger");
        assert_eq!(task.remembered.count, MAX_REMEMBERED);
        task.remembered.add(entry(agents, 0));
        assert!(task.known_messages("1", "s").is_empty());
        assert_eq!(
            (task.known_messages("0", "s").len(), task.known_messages("2", "s").len()),
            (REMEMBERED, REMEMBERED)
        );
        assert_eq!(task.remembered.count, MAX_REMEMBERED - REMEMBERED + 1);
    }

    #[test]
    fn a_batch_is_written_also_when_the_ledger_cannot_be_rewritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        let (_, mut task) = LedgerTask::open(path.clone()).expect("a ledger");
        // The name of its temporary file is taken.
        fs::create_dir(folder.path().join(".ledger.tmp")).expect("a folder");
        task.rewrite().expect_err("no temporary file");
        task.lines = SURPLUS_LINES + 1;
        let (written, _) = oneshot::channel();
        let entry: LedgerEntry = serde_json::from_str(ENTRY).expect("an entry");
        task.append(&[(entry, written)]).expect("the disk has the batch");
        assert_eq!(lines(&path), [r#"{"version":1}"#, ENTRY]);
        assert_eq!(task.lines, 1, "a rewrite was due");
    }

    #[tokio::test]
    async fn entries_outlive_the_broker_and_belong_to_a_session() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ledger");
        let (ledger, task) = LedgerTask::open(path.clone()).expect("a ledger");
        let running = tokio::spawn(task.run());
        for n in 0..600 {
            let entry = LedgerEntry {
                agent_id: "7".into(),
                msg_id: n.to_string(),
                level: Level::Echoed,
                session_ref: Some("s".into()),
            };
            assert!(ledger.record(entry).await);
        }
        drop(ledger);
        running.await.expect("the task ends with its last handle");
        let cut_off = OpenOptions::new().append(true).open(&path).and_then(|mut file| file.write_all(b"{\"agent\xc3"));
        cut_off.expect("a line is cut off");
        let (_, task) = LedgerTask::open(path).expect("a ledger");
        let known = task.known_messages("7", "s");
        assert_eq!((known.len(), known[0].as_str()), (REMEMBERED, "88"));
        assert!(task.known_messages("7", "t").is_empty() && task.known_messages("8", "s").is_empty());
    }
}
