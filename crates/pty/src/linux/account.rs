//! [`Account`]: the user of this machine as whom programs run.

use std::{ffi::CString, io, marker::PhantomData, path::PathBuf, process::Command};

use nix::unistd::{Gid, Uid, User, getgrouplist, setfsgid, setfsuid, setgid, setgroups, setuid};

use super::unsafe_calls;

/// A user with their groups. Only a process of root can start programs as another user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name.
    pub name: String,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

/// Access to files with the rights of an account, for the current thread, until this is dropped.
#[derive(Debug)]
pub struct FileAccess {
    earlier: (Uid, Gid),
    /// The rights belong to one thread.
    _thread: PhantomData<*const ()>,
}

impl Account {
    /// Looks a user up by name. `None` if there is no such user.
    ///
    /// # Errors
    /// If the user database cannot be read.
    pub fn find(name: &str) -> io::Result<Option<Self>> {
        let Some(user) = User::from_name(name)? else { return Ok(None) };
        let login = CString::new(user.name.as_str())?;
        let groups = getgrouplist(&login, user.gid)?;
        let User { name, uid, gid, dir, shell, .. } = user;
        Ok(Some(Self { name, home: dir, shell, uid, gid, groups }))
    }

    /// Number of the user.
    pub fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// Returns whether this process runs as this user.
    pub fn is_own(&self) -> bool {
        self.uid == Uid::effective()
    }

    /// Returns whether this process may start programs as this user.
    pub fn is_allowed(&self) -> bool {
        self.is_own() || Uid::effective().is_root()
    }

    /// Starts the command as this user.
    pub fn apply(&self, command: &mut Command) {
        // A process that is not root may not set its groups, not even to the ones it has.
        if !self.is_own() {
            unsafe_calls::run_as(command, self.clone());
        }
    }

    /// Gives the calling thread the rights of this user to files. Paths that the user controls are safe to follow then.
    pub fn file_access(&self) -> FileAccess {
        // The group first: without root's number it could not be set any more.
        let gid = setfsgid(self.gid);
        FileAccess { earlier: (setfsuid(self.uid), gid), _thread: PhantomData }
    }

    /// Takes the rights of this user permanently. Called between fork and exec.
    pub(super) fn assume(&self) -> io::Result<()> {
        // The user last: without root's number, groups could not be set any more.
        setgroups(&self.groups)?;
        setgid(self.gid)?;
        Ok(setuid(self.uid)?)
    }
}

impl Drop for FileAccess {
    fn drop(&mut self) {
        // The user first: setting the group needs root's number.
        setfsuid(self.earlier.0);
        setfsgid(self.earlier.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name() {
        let root = Account::find("root").expect("a user database").expect("root");
        assert_eq!((root.uid(), root.home.as_path()), (0, std::path::Path::new("/root")));
        assert_eq!(Account::find("no-such-user-here").expect("a user database"), None);
    }
}
