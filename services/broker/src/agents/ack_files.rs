//! Ack files: [`AckFolder`], where one agent writes them and how they are read.

use std::{
    io::{self, Read as _},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use relay_pty::{Account, FileAccess};
use relay_verification::ack_file::{MAX_ACK_FILE_BYTES, acks_folder, is_plain_file_name};
use rustix::{
    fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use crate::clock;

/// A file that was not accepted is removed after this time.
const KEPT_FOR: Duration = Duration::from_secs(60 * 60);
/// Attempts to make the folder. One fails only if another agent ended at that moment and removed the empty folders
/// above, so that 64 in a row mean another error.
const MAX_ATTEMPTS: usize = 64;

/// Folder of one agent's ack files. A project may bring links in its place, so that every step to it is taken without
/// following any, at each use: the agent may remove the folder and make it again.
#[derive(Debug, Clone)]
pub(super) struct AckFolder {
    working_directory: PathBuf,
    /// Path of the folder below the working directory.
    relative: String,
    path: PathBuf,
    /// User of the agent, if not the broker's own. The user controls every path below the working directory, so they
    /// are followed with that user's rights only.
    account: Option<Arc<Account>>,
}

impl AckFolder {
    /// Creates the folder below the agent's working directory. `None` if that is not possible: then agents cannot
    /// confirm by file.
    pub(super) fn create(working_directory: &Path, agent: &str, account: Option<Arc<Account>>) -> Option<Self> {
        let folder = Self::for_agent(working_directory, agent, account);
        // Changes the rights of this thread until it is dropped. So everything here blocks, and nothing awaits.
        let _access = folder.access();
        // Set explicitly: the folder may have been there with other rights, and the umask may have taken some.
        let made = make_folder(working_directory, &folder.relative)
            .and_then(|folder| fs::fchmod(&folder, Mode::RWXU).map_err(io::Error::from));
        match made {
            Ok(()) => Some(folder),
            Err(error) => {
                tracing::info!(path = %folder.path.display(), %error, "the folder for ack files cannot be created");
                None
            }
        }
    }

    /// The folder of an agent that may have ended.
    pub(super) fn for_agent(working_directory: &Path, agent: &str, account: Option<Arc<Account>>) -> Self {
        let relative = acks_folder(agent);
        let path = working_directory.join(&relative);
        Self { working_directory: working_directory.to_owned(), relative, path, account }
    }

    /// Path of the folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a file, given relative to the working directory. Links, other kinds of files, and files of other users
    /// are not opened or not read. Blocks.
    pub(super) fn read(&self, relative: &str) -> Option<Vec<u8>> {
        let _access = self.access();
        let name = self.file_name(relative)?;
        let folder = self.open().ok()?;
        // Not blocking: a named pipe without a writer would hang the open.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = fs::openat(&folder, name, flags, Mode::empty()).ok()?;
        if !self.is_agents_file(&fs::fstat(opened.as_fd()).ok()?) {
            return None;
        }
        let mut content = Vec::new();
        // One byte more than allowed, so that a file that is too large is recognised.
        let mut file = std::fs::File::from(opened).take(MAX_ACK_FILE_BYTES as u64 + 1);
        file.read_to_end(&mut content).ok()?;
        Some(content)
    }

    /// Removes a file that was accepted. Blocks.
    pub(super) fn remove(&self, relative: &str) {
        let _access = self.access();
        let Some(name) = self.file_name(relative) else { return };
        let removed = self.open().and_then(|folder| Ok(fs::unlinkat(&folder, name, AtFlags::empty())?));
        if let Err(error) = removed {
            tracing::debug!(path = relative, %error, "an ack file could not be removed");
        }
    }

    /// Removes files that were not accepted in time. A file that cannot be an ack file is foreign and stays.
    /// Blocks.
    pub(super) fn sweep(&self) {
        self.remove_older(KEPT_FOR);
    }

    /// Removes all files that can be ack files: no process whose acks count is left. Blocks.
    pub(super) fn clear(&self) {
        self.remove_older(Duration::ZERO);
    }

    fn remove_older(&self, least_age: Duration) {
        let _access = self.access();
        let Ok(folder) = self.open() else { return };
        let Ok(entries) = Dir::read_from(&folder) else { return };
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name();
            if !name.to_str().is_ok_and(is_plain_file_name) {
                continue;
            }
            let Ok(facts) = fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let is_small = usize::try_from(facts.st_size).is_ok_and(|bytes| bytes <= MAX_ACK_FILE_BYTES);
            if is_small
                && self.is_agents_file(&facts)
                // A file with a modification time in the future has no age; at the agent's end it is removed all the
                // same.
                && (least_age.is_zero() || age(&facts).is_some_and(|age| age >= least_age))
            {
                // The next sweep comes to it again.
                let _ = fs::unlinkat(&folder, name, AtFlags::empty());
            }
        }
    }

    /// Removes the folder of an agent that has ended, and the folders above it up to the working directory, as far as
    /// they are empty. Blocks.
    pub(super) fn remove_empty(&self) {
        let _access = self.access();
        let mut path = self.relative.as_str();
        loop {
            let (above, name) = path.rsplit_once('/').map_or((None, path), |(above, name)| (Some(above), name));
            let removed = open_folder(&self.working_directory, above, |_, _| Ok(()))
                .and_then(|folder| fs::unlinkat(&folder, name, AtFlags::REMOVEDIR).map_err(io::Error::from));
            match removed {
                Ok(()) => {}
                // The agent or a person may have removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // It holds files that are not ours, or folders of other agents.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return,
                Err(error) => {
                    let path = self.working_directory.join(path);
                    tracing::warn!(path = %path.display(), %error, "an empty folder of ack files could not be removed");
                    return;
                }
            }
            match above {
                Some(above) => path = above,
                None => return,
            }
        }
    }

    fn open(&self) -> io::Result<OwnedFd> {
        open_folder(&self.working_directory, Some(&self.relative), |_, _| Ok(()))
    }

    /// Name of a file that is directly in the folder.
    fn file_name<'a>(&self, relative: &'a str) -> Option<&'a str> {
        let name = relative.strip_prefix(&self.relative)?.strip_prefix('/')?;
        is_plain_file_name(name).then_some(name)
    }

    /// Returns whether it is a regular file of the agent's user or the broker's.
    fn is_agents_file(&self, facts: &Stat) -> bool {
        let is_agents = self.account.as_ref().is_some_and(|account| account.uid() == facts.st_uid);
        let is_own = is_agents || facts.st_uid == rustix::process::getuid().as_raw();
        is_own && FileType::from_raw_mode(facts.st_mode) == FileType::RegularFile
    }

    fn access(&self) -> Option<FileAccess> {
        self.account.as_ref().map(|account| account.file_access())
    }
}

fn make_folder(working_directory: &Path, relative: &str) -> io::Result<OwnedFd> {
    let make = || {
        open_folder(working_directory, Some(relative), |parent, name| match fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        })
    };
    let mut attempts = 1;
    loop {
        match make() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempts < MAX_ATTEMPTS => attempts += 1,
            made => return made,
        }
    }
}

/// Opens a folder, or one below it, step by step and without following links. `prepare` is called before each step.
fn open_folder(
    above: &Path,
    relative: Option<&str>,
    prepare: impl Fn(&OwnedFd, &str) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    // The first step may follow links: the driver has named that folder. Only the folders below it belong to the
    // project.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut folder = fs::open(above, flags, Mode::empty())?;
    for name in relative.into_iter().flat_map(|relative| relative.split('/')) {
        prepare(&folder, name)?;
        folder = fs::openat(&folder, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Ok(folder)
}

/// Time since the last change of a file's content.
fn age(facts: &Stat) -> Option<Duration> {
    let seconds = clock::unix_ms() / 1000 - facts.st_mtime;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

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

    #[test]
    fn the_last_end_of_an_agent_removes_the_folders_that_are_empty() {
        let home = tempfile::tempdir().expect("a folder");
        let create = |agent| AckFolder::create(home.path(), agent, None).expect("a folder");
        let (ada, bob) = (create("ada"), create("bob"));
        ada.remove_empty();
        ada.remove_empty();
        assert!(!home.path().join(".agent-relay/ada").exists() && bob.path().is_dir());
        std::fs::write(bob.path().join("d1"), "{}").expect("a file");
        bob.remove_empty();
        assert!(bob.path().join("d1").is_file());
        bob.remove(&format!("{}/d1", acks_folder("bob")));
        bob.remove_empty();
        assert_eq!(home.path().read_dir().expect("a folder").count(), 0);
        // The agent may have removed it, and left the folders above.
        std::fs::create_dir(home.path().join(".agent-relay")).expect("a folder");
        bob.remove_empty();
        assert_eq!(home.path().read_dir().expect("a folder").count(), 0);
    }

    #[test]
    fn a_link_in_place_of_a_folder_stays_with_its_target() {
        let (home, elsewhere) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let folder = AckFolder::create(home.path(), "x", None).expect("a folder");
        std::fs::create_dir_all(elsewhere.path().join("x/acks")).expect("a folder");
        std::fs::remove_dir_all(home.path().join(".agent-relay")).expect("a folder");
        std::os::unix::fs::symlink(elsewhere.path(), home.path().join(".agent-relay")).expect("a link");
        folder.remove_empty();
        assert!(home.path().join(".agent-relay").is_symlink() && elsewhere.path().join("x/acks").is_dir());
    }

    #[test]
    fn agents_that_start_while_others_end_get_their_folders() {
        let home = tempfile::tempdir().expect("a folder");
        std::thread::scope(|scope| {
            for agent in ["ada", "bob"] {
                let home = home.path();
                scope.spawn(move || {
                    for _ in 0..500 {
                        AckFolder::create(home, agent, None).expect("a folder").remove_empty();
                    }
                });
            }
        });
        assert_eq!(home.path().read_dir().expect("a folder").count(), 0);
    }

    #[test]
    fn a_link_in_place_of_a_folder_is_not_followed() {
        let elsewhere = tempfile::tempdir().expect("a folder");
        for link in [".agent-relay", ".agent-relay/x", ".agent-relay/x/acks"] {
            let home = tempfile::tempdir().expect("a folder");
            let link = home.path().join(link);
            std::fs::create_dir_all(link.parent().expect("a parent")).expect("a folder");
            std::os::unix::fs::symlink(elsewhere.path(), link).expect("a link");
            assert!(AckFolder::create(home.path(), "x", None).is_none());
            assert_eq!(elsewhere.path().read_dir().expect("a folder").count(), 0, "nothing is created there");
        }
    }

    #[test]
    fn files_that_nobody_read_do_not_keep_the_folder_and_foreign_ones_do() {
        let home = tempfile::tempdir().expect("a folder");
        let folder = AckFolder::create(home.path(), "x", None).expect("a folder");
        std::fs::write(folder.path().join("d1"), "{}").expect("a file");
        folder.sweep();
        folder.remove_empty();
        assert!(folder.path().join("d1").is_file(), "it may still be read");
        std::fs::write(folder.path().join(".hidden"), "x").expect("a file");
        folder.clear();
        folder.remove_empty();
        assert!(!folder.path().join("d1").exists() && folder.path().join(".hidden").is_file());
        std::fs::remove_file(folder.path().join(".hidden")).expect("a file");
        AckFolder::for_agent(home.path(), "x", None).remove_empty();
        assert_eq!(home.path().read_dir().expect("a folder").count(), 0);
        folder.clear();
    }

    #[test]
    fn only_old_files_that_can_be_acks_are_swept() {
        let home = tempfile::tempdir().expect("a folder");
        let folder = AckFolder::create(home.path(), "x", None).expect("a folder");
        let write = |name: &str, content: String| {
            let file = std::fs::File::create(folder.path().join(name)).expect("a file");
            (&file).write_all(content.as_bytes()).expect("room");
            file
        };
        for (name, bytes) in [("d1", 10), ("large", MAX_ACK_FILE_BYTES + 1), (".hidden", 10)] {
            let file = write(name, "x".repeat(bytes));
            let now = file.metadata().and_then(|facts| facts.modified()).expect("a time");
            file.set_modified(now - KEPT_FOR - Duration::from_secs(60)).expect("an age");
        }
        write("d2", "x".to_owned());
        std::fs::create_dir(folder.path().join("d3")).expect("a folder");
        folder.sweep();
        let mut left: Vec<_> = folder.path().read_dir().expect("a folder").map(|e| e.expect("e").file_name()).collect();
        left.sort();
        assert_eq!(left, [".hidden", "d2", "d3", "large"]);
    }
}
