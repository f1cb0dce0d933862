//! The state directory of one broker, and the lock that keeps it the only one there.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use super::create_private_directory;

/// Directory of a persistent broker below its working directory. Clients look for the connection file there.
const DEFAULT_DIRECTORY: &str = ".agentworkforce/relay";
/// Not `broker-….lock`: published command lines delete files of that form.
const LOCK_FILE: &str = "lock";

/// Fate of the state when the broker ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persistence {
    /// Kept, and read by the next broker on the same directory.
    Kept,
    /// Removed with the broker.
    Removed,
}

/// Directory with the files of one broker, locked for it. The lock ends with the process.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    path: PathBuf,
    persistence: Persistence,
    _temporary: Option<tempfile::TempDir>,
    _lock: File,
}

impl StateDirectory {
    /// Opens and locks the directory given, that of the working directory if `persist`, or a temporary one.
    ///
    /// # Errors
    /// If another broker has it, or it cannot be created.
    pub(crate) fn open(given: Option<&Path>, persist: bool, working_directory: &Path) -> Result<Self> {
        let default = persist.then(|| working_directory.join(DEFAULT_DIRECTORY));
        let (path, temporary) = match given.map(Path::to_owned).or(default) {
            Some(path) => (path, None),
            None => {
                let temporary = tempfile::Builder::new().prefix("agent-relay-").tempdir();
                let temporary = temporary.context("create a temporary state directory")?;
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        create_private_directory(&path).with_context(|| format!("create the state directory {}", path.display()))?;
        let path = path.canonicalize().with_context(|| format!("open the state directory {}", path.display()))?;
        let lock = lock(&path)?;
        let persistence = if temporary.is_some() { Persistence::Removed } else { Persistence::Kept };
        Ok(Self { path, persistence, _temporary: temporary, _lock: lock })
    }

    /// Path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fate of the state when the broker ends.
    pub(crate) fn persistence(&self) -> Persistence {
        self.persistence
    }

    /// Path of a file of the broker called `instance`: `<kind>-<instance>.<extension>`.
    pub(crate) fn file(&self, kind: &str, instance: &str, extension: &str) -> PathBuf {
        let is_plain = |character: char| character.is_ascii_alphanumeric() || character == '-';
        let instance: String = instance.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
        self.path.join(format!("{kind}-{instance}.{extension}"))
    }
}

fn lock(directory: &Path) -> Result<File> {
    let path = directory.join(LOCK_FILE);
    let mut options = OpenOptions::new();
    let opened = options.create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = opened.with_context(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        // Published command lines look for this phrase.
        Err(TryLockError::WouldBlock) => {
            bail!("another broker instance is already running in this directory ({})", directory.display())
        }
        Err(TryLockError::Error(error)) => Err(error).context("lock the state directory"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_directory_is_private_and_has_one_broker() {
        let home = tempfile::tempdir().expect("a folder");
        let first = StateDirectory::open(None, true, home.path()).expect("the first");
        assert!(first.path().ends_with(DEFAULT_DIRECTORY));
        assert_eq!(first.persistence(), Persistence::Kept);
        let mode = first.path().metadata().expect("a folder").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let second = StateDirectory::open(Some(first.path()), false, home.path()).expect_err("the second");
        assert!(second.to_string().contains("another broker instance is already running"), "{second}");
        drop(first);
        StateDirectory::open(None, true, home.path()).expect("the lock ends with its holder");
    }

    #[test]
    fn names_of_files_stay_in_the_directory() {
        let home = tempfile::tempdir().expect("a folder");
        let directory = StateDirectory::open(None, false, home.path()).expect("a directory");
        let path = directory.file("state", "../x y", "json");
        assert_eq!(path, directory.path().join("state----x-y.json"));
    }
}
