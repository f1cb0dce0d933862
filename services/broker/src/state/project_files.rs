//! [`ProjectFiles`]: configuration files of agent programs in users' projects. Entries of the broker are merged into
//! them while an agent runs there, and taken out again with the last one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail, ensure};
use relay_pty::Account;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{read_versioned, write_versioned};

/// Version of the record.
const VERSION: u32 = 1;
/// A file above this size is no configuration of a person.
const MAX_BYTES: usize = 1 << 20;

/// The files that hold entries of this broker. They are recorded before they are changed, so that a later broker can
/// restore those of one that was killed.
#[derive(Debug)]
pub(crate) struct ProjectFiles {
    record: PathBuf,
    /// User to whom the projects belong, if not the broker's own.
    account: Option<Arc<Account>>,
    files: Mutex<BTreeMap<PathBuf, ProjectFile>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ProjectFile {
    /// Content without our entries; none if there was no file.
    original: Option<String>,
    /// Content with them.
    merged: String,
    /// Key of the object with the entries.
    key: String,
    /// Names of our entries.
    names: BTreeSet<String>,
    /// The folder of the file was not there before.
    made_folder: bool,
    /// Agents that run in the project; none if the file could not be restored with the last one.
    #[serde(skip)]
    agents: BTreeSet<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    files: BTreeMap<PathBuf, ProjectFile>,
}

/// Place of a file in a project, which may have links.
#[derive(Debug, Clone)]
pub(crate) struct ProjectPath {
    pub(crate) project: PathBuf,
    /// Path below the project.
    pub(crate) file: String,
}

impl ProjectPath {
    /// Path of the file without links. One that is led out of the project is refused: it is no file of the project.
    fn find(&self) -> Result<PathBuf> {
        let project = self.project.canonicalize().context("open the project")?;
        let mut known = project.join(&self.file);
        let mut missing = Vec::new();
        // The file and folders above it may not be there yet.
        while known.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            && let Some(name) = known.file_name()
        {
            missing.push(name.to_owned());
            known.pop();
        }
        let found = known.canonicalize().with_context(|| format!("follow {}", known.display()))?;
        ensure!(found.starts_with(&project), "{} leads out of the project", known.display());
        Ok(missing.into_iter().rev().fold(found, |path, name| path.join(name)))
    }
}

impl ProjectFiles {
    /// Reads the record and restores what the previous broker has left. Files that cannot be restored stay in it.
    ///
    /// # Errors
    /// If the record cannot be read, or a newer broker has written it.
    pub(crate) fn open(record: PathBuf, account: Option<Arc<Account>>) -> Result<Self> {
        let mut left: Record = read_versioned(&record, VERSION)?.unwrap_or_default();
        let count = left.files.len();
        left.files.retain(|path, file| !restore_or_warn(path, file, account.as_deref()));
        if left.files.len() < count {
            write_versioned(&record, VERSION, &left)?;
        }
        Ok(Self { record, account, files: Mutex::new(left.files) })
    }

    /// Merges entries below `key` into a file of a project for an agent. An entry of that name that a person has
    /// written stays. Blocks.
    ///
    /// # Errors
    /// If the file is outside of the project, no JSON object that can be merged, or cannot be written; it is unchanged
    /// then.
    pub(crate) fn add(
        &self,
        agent: &str,
        location: &ProjectPath,
        key: &str,
        entries: &Map<String, Value>,
    ) -> Result<()> {
        // Links of the project are followed with the user's rights only.
        let path = with_rights(self.account.as_deref(), || location.find())?;
        let path = path.as_path();
        // Held over the work on the file: two agents of a project would each take the entries of the other for a
        // person's.
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get_mut(path).filter(|file| !file.agents.is_empty()) {
            file.agents.insert(agent.to_owned());
            return Ok(());
        }
        let account = self.account.as_deref();
        if let Some(left) = files.get(path) {
            with_rights(account, || restore(path, left)).context("take out entries of agents that have ended")?;
            files.remove(path);
            self.write_record(&files)?;
        }
        let original = with_rights(account, || read(path))?;
        let Some((merged, names)) = merge(original.as_deref(), key, entries)? else { return Ok(()) };
        let agents = BTreeSet::from([agent.to_owned()]);
        let made_folder = path.parent().is_some_and(|folder| !folder.exists());
        let file = ProjectFile { original, merged, key: key.to_owned(), names, made_folder, agents };
        files.insert(path.to_owned(), file.clone());
        // The record first: a later broker leaves a file alone that still has its original content.
        let written = self
            .write_record(&files)
            .and_then(|()| with_rights(account, || replace(path, &file.merged)).context("write it"));
        if written.is_err() {
            files.remove(path);
            // Otherwise a later broker finds nothing of ours in the file and leaves it alone.
            let _ = self.write_record(&files);
        }
        written
    }

    /// An agent has ended: files of projects without another agent are restored. Those that cannot be restored stay in
    /// the record. Blocks.
    pub(crate) fn remove(&self, agent: &str) {
        // Held until the file is restored, so that no new agent merges into it in between.
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let is_left = |file: &mut ProjectFile| file.agents.remove(agent) && file.agents.is_empty();
        let left: Vec<_> = files.extract_if(.., |_, file| is_left(file)).collect();
        let is_changed = !left.is_empty();
        for (path, file) in left {
            if !restore_or_warn(&path, &file, self.account.as_deref()) {
                files.insert(path, file);
            }
        }
        if is_changed && let Err(error) = self.write_record(&files) {
            tracing::warn!(error = format!("{error:#}"), "restored project files are still in the record");
        }
    }

    fn write_record(&self, files: &BTreeMap<PathBuf, ProjectFile>) -> Result<()> {
        write_versioned(&self.record, VERSION, &Record { files: files.clone() })
    }
}

/// Reads a regular file. A pipe would hang every spawn, a device would fill the memory.
fn read(path: &Path) -> Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(opened) => File::from(opened),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error).context("open it"),
    };
    ensure!(file.metadata().context("look at it")?.is_file(), "it is no regular file");
    let mut bytes = Vec::new();
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).context("read it")?;
    ensure!(bytes.len() <= MAX_BYTES, "it is above 1 MiB");
    Ok(Some(String::from_utf8(bytes).context("it is not text")?))
}

/// The content with the entries that are not there, and their names. `None` if all are there.
fn merge(
    original: Option<&str>,
    key: &str,
    entries: &Map<String, Value>,
) -> Result<Option<(String, BTreeSet<String>)>> {
    let mut content: Map<String, Value> = match original.filter(|text| !text.trim().is_empty()) {
        Some(text) => serde_json::from_str(text).context("it is not a JSON object, possibly because of comments")?,
        None => Map::new(),
    };
    let Value::Object(servers) = content.entry(key).or_insert_with(|| Value::Object(Map::new())) else {
        bail!("its {key} is not an object");
    };
    let mut names = BTreeSet::new();
    for (name, entry) in entries {
        if !servers.contains_key(name) {
            servers.insert(name.clone(), entry.clone());
            names.insert(name.clone());
        }
    }
    Ok((!names.is_empty()).then(|| (format!("{:#}\n", Value::Object(content)), names)))
}

/// Runs `action` with the rights of a user, who may have put links into the project.
fn with_rights<T>(account: Option<&Account>, action: impl FnOnce() -> T) -> T {
    let _access = account.map(Account::file_access);
    action()
}

/// Returns whether the entries are out of the file.
fn restore_or_warn(path: &Path, file: &ProjectFile, account: Option<&Account>) -> bool {
    let restored = with_rights(account, || restore(path, file));
    if let Err(error) = &restored {
        tracing::warn!(
            path = %path.display(),
            error = format!("{error:#}"),
            "failed to remove entries of ended agents from a project file, retrying with the next agent or start"
        );
    }
    restored.is_ok()
}

/// Takes the entries out. A file that a person has changed meanwhile keeps the changes.
fn restore(path: &Path, file: &ProjectFile) -> Result<()> {
    let Some(current) = read(path)? else { return Ok(()) };
    if file.original.as_ref() == Some(&current) {
        return Ok(());
    }
    let restored = if current == file.merged { file.original.clone() } else { remove_entries(&current, file)? };
    match restored {
        Some(content) => replace(path, &content).context("write it"),
        None => {
            fs::remove_file(path).context("remove it")?;
            if let Some(folder) = path.parent().filter(|_| file.made_folder) {
                // A person may have put other files into it.
                let _ = fs::remove_dir(folder);
            }
            Ok(())
        }
    }
}

/// The content without the entries; `None` if nothing is left of a file that was not there before.
fn remove_entries(current: &str, file: &ProjectFile) -> Result<Option<String>> {
    let mut content: Map<String, Value> = serde_json::from_str(current).context("it is not a JSON object any more")?;
    if let Some(Value::Object(servers)) = content.get_mut(&file.key) {
        servers.retain(|name, _| !file.names.contains(name));
        if servers.is_empty() && file.original.is_none() {
            content.shift_remove(&file.key);
        }
    }
    let is_needed = !content.is_empty() || file.original.is_some();
    Ok(is_needed.then(|| format!("{:#}\n", Value::Object(content))))
}

/// Replaces a file in one step and keeps its permissions.
fn replace(path: &Path, content: &str) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(content.as_bytes())?;
    if let Ok(known) = path.metadata() {
        file.as_file().set_permissions(known.permissions())?;
    }
    file.persist(path).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    struct Project {
        folder: tempfile::TempDir,
        files: ProjectFiles,
    }

    impl Project {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let files = ProjectFiles::open(folder.path().join("record.json"), None).expect("no record");
            Self { folder, files }
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join(".cursor/mcp.json")
        }

        fn write(&self, content: &str) {
            replace(&self.path(), content).expect("a file");
        }

        fn content(&self) -> Option<String> {
            fs::read_to_string(self.path()).ok()
        }

        fn servers(&self) -> Vec<String> {
            let content: Value = serde_json::from_str(&self.content().expect("a file")).expect("JSON");
            content["mcpServers"].as_object().map(|servers| servers.keys().cloned().collect()).unwrap_or_default()
        }

        fn add(&self, agent: &str) -> Result<()> {
            self.add_at(agent, ".cursor/mcp.json")
        }

        fn add_at(&self, agent: &str, file: &str) -> Result<()> {
            let entries = json!({ "relay-node": { "command": "x" } });
            let location = ProjectPath { project: self.folder.path().to_owned(), file: file.to_owned() };
            self.files.add(agent, &location, "mcpServers", entries.as_object().expect("an object"))
        }
    }

    #[test]
    fn pipes_devices_and_links_out_of_the_project_are_left_alone() {
        let project = Project::new();
        let outside = tempfile::NamedTempFile::new().expect("a file");
        fs::write(outside.path(), "{}").expect("room");
        let at = |name: &str| project.folder.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        let links = [("device", Path::new("/dev/zero")), ("link", outside.path()), ("dangling", Path::new("/no/file"))];
        for (name, target) in links {
            symlink(target, at(name)).expect("a link");
        }
        symlink(outside.path().parent().expect("a folder"), at("folder")).expect("a link");
        fs::write(at("inside"), "{}").expect("room");
        symlink(at("inside"), at("inner")).expect("a link");
        for odd in ["pipe", "device", "link", "dangling", "folder/new.json"] {
            project.add_at("ada", odd).expect_err(odd);
        }
        assert_eq!(fs::read_to_string(outside.path()).expect("a file"), "{}");
        project.add_at("ada", "inner").expect("a link within the project");
        assert!(fs::read_to_string(at("inside")).expect("a file").contains("relay-node"));
        project.files.remove("ada");
        assert_eq!(fs::read_to_string(at("inner")).expect("a file"), "{}");
    }

    #[test]
    fn a_file_of_a_person_is_merged_and_comes_back_byte_by_byte_with_the_last_agent() {
        let project = Project::new();
        let original = "{ \"mcpServers\": {\"mine\":{\"command\":\"y\"}},\n\"z\": 1 , \"a\": 2}";
        project.write(original);
        project.add("ada").expect("merged");
        project.add("bob").expect("shared");
        assert_eq!(project.servers(), ["mine", "relay-node"]);
        project.files.remove("ada");
        assert_eq!(project.servers(), ["mine", "relay-node"]);
        project.files.remove("bob");
        assert_eq!(project.content().as_deref(), Some(original));
    }

    #[test]
    fn changes_of_a_person_stay_and_a_new_file_goes() {
        let project = Project::new();
        project.add("ada").expect("a new file");
        assert_eq!(project.servers(), ["relay-node"]);
        project.files.remove("ada");
        assert!(!project.path().parent().is_some_and(Path::exists));
        project.add("ada").expect("a new file");
        project.write(r#"{"mcpServers": {"relay-node": {}, "mine": {}}}"#);
        project.files.remove("ada");
        assert_eq!(project.servers(), ["mine"]);
        // An entry of our name that a person wrote is theirs.
        project.write(r#"{"mcpServers": {"relay-node": {"command": "theirs"}}}"#);
        project.add("ada").expect("nothing to do");
        project.files.remove("ada");
        assert_eq!(project.servers(), ["relay-node"]);
    }

    #[test]
    fn a_file_that_cannot_be_merged_is_left_alone() {
        let project = Project::new();
        for odd in ["{ // mine\n}", "[1]", r#"{"mcpServers": 5}"#] {
            project.write(odd);
            assert!(project.add("ada").is_err(), "{odd}");
            project.files.remove("ada");
            assert_eq!(project.content().as_deref(), Some(odd));
        }
    }

    #[test]
    fn a_file_that_cannot_be_restored_is_restored_later() {
        let project = Project::new();
        project.add("ada").expect("a new file");
        let merged = project.content().expect("a file");
        let commented = format!("// mine\n{merged}");
        project.write(&commented);
        project.files.remove("ada");
        project.add("bob").expect_err("the comment is still there");
        assert_eq!(project.content().as_ref(), Some(&commented));
        project.write(&merged);
        project.add("bob").expect("the old entries are replaced");
        assert_eq!(project.servers(), ["relay-node"]);
        project.files.remove("bob");
        assert_eq!(project.content(), None);

        project.add("ada").expect("a new file");
        project.write(&commented);
        let record = project.files.record.clone();
        ProjectFiles::open(record.clone(), None).expect("a record");
        assert_eq!(project.content().as_ref(), Some(&commented));
        project.write(&merged);
        ProjectFiles::open(record, None).expect("a record");
        assert_eq!(project.content(), None, "the broker after the next one restores it");
    }

    #[test]
    fn a_later_broker_restores_the_files_of_a_killed_one() {
        let project = Project::new();
        project.write("{}");
        project.add("ada").expect("merged");
        let record = project.files.record.clone();
        ProjectFiles::open(record.clone(), None).expect("a record");
        assert_eq!(project.content().as_deref(), Some("{}"));
        project.write(r#"{"mcpServers": {"relay-node": {}}}"#);
        ProjectFiles::open(record, None).expect("a record");
        assert_eq!(project.servers(), ["relay-node"], "the record is empty now");
    }
}
