//! [`AckFolder`]: where one agent writes its ack files, and how they are read.

use std::{
    io::Read as _,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use relay_pty::{Account, FileAccess};
use relay_verification::ack_file::{MAX_ACK_FILE_BYTES, acks_folder};
use rustix::fs::{self, FileType, Mode, OFlags};

use crate::state::create_private_directory;

/// A file that was not accepted is removed after this time.
const KEPT_FOR: Duration = Duration::from_secs(60 * 60);

/// Folder of one agent's ack files.
#[derive(Debug, Clone)]
pub(super) struct AckFolder {
    working_directory: PathBuf,
    folder: PathBuf,
    /// User of the agent, if not the broker's own. The user controls every path below the working directory, so they are
    /// followed with that user's rights only.
    account: Option<Arc<Account>>,
}

impl AckFolder {
    /// Creates the folder below the agent's working directory. `None` if that is not possible: then agents cannot
    /// confirm by file.
    pub(super) fn create(working_directory: &Path, agent: &str, account: Option<Arc<Account>>) -> Option<Self> {
        let _access = account.as_ref().map(|account| account.file_access());
        let folder = working_directory.join(acks_folder(agent));
        match create_private_directory(&folder) {
            Ok(()) => {
                let created = Self { working_directory: working_directory.to_owned(), folder, account };
                created.sweep();
                Some(created)
            }
            Err(error) => {
                tracing::info!(path = %folder.display(), %error, "the folder for ack files cannot be created");
                None
            }
        }
    }

    /// Path of the folder.
    pub(super) fn path(&self) -> &Path {
        &self.folder
    }

    /// Reads a file, given relative to the working directory. Links, other kinds of files, and files of other users
    /// are not opened or not read. Blocks.
    pub(super) fn read(&self, relative: &str) -> Option<Vec<u8>> {
        let _access = self.access();
        // Not blocking: a named pipe without a writer would hang the open.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = fs::open(self.working_directory.join(relative), flags, Mode::empty()).ok()?;
        let facts = fs::fstat(opened.as_fd()).ok()?;
        let is_agents = self.account.as_ref().is_some_and(|account| account.uid() == facts.st_uid);
        let is_own = is_agents || facts.st_uid == rustix::process::getuid().as_raw();
        if FileType::from_raw_mode(facts.st_mode) != FileType::RegularFile || !is_own {
            return None;
        }
        let mut content = Vec::new();
        let mut file = std::fs::File::from(opened).take(MAX_ACK_FILE_BYTES as u64 + 1);
        file.read_to_end(&mut content).ok()?;
        Some(content)
    }

    fn access(&self) -> Option<FileAccess> {
        self.account.as_ref().map(|account| account.file_access())
    }

    /// Removes files of earlier agents that were never accepted. Blocks.
    fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        for entry in entries.filter_map(Result::ok) {
            let age = entry.metadata().ok().and_then(|facts| facts.modified().ok()?.elapsed().ok());
            let is_file = entry.file_type().is_ok_and(|kind| !kind.is_dir());
            if is_file && age.is_some_and(|age| age >= KEPT_FOR) {
                // The next sweep comes to it again.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Removes a file that was accepted. Blocks.
    pub(super) fn remove(&self, relative: &str) {
        let _access = self.access();
        let path = self.working_directory.join(relative);
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::debug!(path = %path.display(), %error, "an ack file could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_limited_size_are_read() {
        let home = tempfile::tempdir().expect("a folder");
        let folder = AckFolder::create(home.path(), "../x", None).expect("a folder");
        assert!(folder.path().starts_with(home.path().join(".agent-relay")));
        let at = |name: &str| format!("{}/{name}", acks_folder("../x"));
        std::fs::write(home.path().join(at("d1")), "{}").expect("a file");
        assert_eq!(folder.read(&at("d1")).as_deref(), Some(b"{}".as_slice()));
        std::os::unix::fs::symlink(home.path().join(at("d1")), home.path().join(at("d2"))).expect("a link");
        std::fs::create_dir(home.path().join(at("d3"))).expect("a folder");
        assert!(
            folder.read(&at("d2")).is_none() && folder.read(&at("d3")).is_none() && folder.read(&at("d4")).is_none()
        );
        std::fs::write(home.path().join(at("d5")), "x".repeat(1 << 20)).expect("a file");
        assert_eq!(folder.read(&at("d5")).map(|content| content.len()), Some(MAX_ACK_FILE_BYTES + 1));
        folder.remove(&at("d1"));
        assert!(folder.read(&at("d1")).is_none());
    }
}
