//! State folder of a stack: persistent, or removed with the stack.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use tempfile::TempDir;

const PREFIX: &str = "relay-stack-";
const LOCK: &str = "owner.lock";
/// A folder younger than this may belong to a process that has not locked it yet.
const MIN_ABANDONED_AGE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) enum StateDir {
    /// Folder that is removed when dropped. The lock shows [`sweep`] that it is in use.
    Temporary { dir: TempDir, _lock: File },
    /// Folder that stays.
    Kept(PathBuf),
}

impl StateDir {
    pub(super) fn open(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self::Kept(dir.canonicalize()?))
    }

    pub(super) fn temporary() -> Result<Self> {
        sweep(&std::env::temp_dir());
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        // Postgres' user traverses it when this process is root.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711))?;
        let lock = File::create(dir.path().join(LOCK))?;
        lock.lock()?;
        Ok(Self::Temporary { dir, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Temporary { dir, .. } => dir.path(),
            Self::Kept(dir) => dir,
        }
    }
}

/// Removes the folders of killed processes and of stacks in statics, which are never dropped.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if ours && is_abandoned(&entry.path()) {
            // Folders of other users cannot be removed and need not be.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_abandoned(dir: &Path) -> bool {
    let age = fs::metadata(dir).and_then(|meta| meta.modified()).ok().and_then(|at| at.elapsed().ok());
    if age.is_none_or(|age| age < MIN_ABANDONED_AGE) {
        return false;
    }
    File::open(dir.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::SystemTime;

    use super::*;

    fn age(dir: &Path) {
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        let times = FileTimes::new().set_modified(long_ago);
        File::open(dir).unwrap().set_times(times).unwrap();
    }

    #[test]
    fn only_old_folders_without_an_owner_are_swept() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let dir = parent.path().join(name);
            fs::create_dir(&dir).unwrap();
            File::create(dir.join(LOCK)).unwrap();
            dir
        };
        let (abandoned, owned, young, foreign) =
            (make("relay-stack-a"), make("relay-stack-b"), make("relay-stack-c"), make("other"));
        let owner = File::open(owned.join(LOCK)).unwrap();
        owner.lock().unwrap();
        [&abandoned, &owned, &foreign].into_iter().for_each(|dir| age(dir));
        sweep(parent.path());
        assert!(!abandoned.exists());
        assert!(owned.exists() && young.exists() && foreign.exists());
    }
}
