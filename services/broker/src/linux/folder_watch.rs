//! [`FolderWatch`]: the kernel's notification of new files in folders. Where it gives none, they are polled.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};
use tokio::sync::Notify;

/// Room for the events of one read.
const BUFFER: usize = 4096;

type Folders = Mutex<HashMap<i32, Arc<Notify>>>;

/// One watch for the folders of all agents.
#[derive(Debug)]
pub(crate) struct FolderWatch {
    /// Absent where the kernel gives none: too many in use.
    kernel: Option<Arc<OwnedFd>>,
    folders: Arc<Folders>,
}

/// A folder that is watched until this is dropped.
#[derive(Debug)]
pub(crate) struct WatchedFolder {
    watch: Arc<FolderWatch>,
    id: i32,
    changed: Arc<Notify>,
}

impl FolderWatch {
    /// Opens the watch and starts the one thread that reads it, which ends with the process.
    pub(crate) fn new() -> Arc<Self> {
        let folders = Arc::<Folders>::default();
        let opened = inotify::init(CreateFlags::CLOEXEC).map_err(std::io::Error::from).map(Arc::new);
        let started = opened.and_then(|kernel| {
            let (read, known) = (kernel.clone(), folders.clone());
            thread::Builder::new().name("folder-watch".to_owned()).spawn(move || pass_on(&read, &known))?;
            Ok(kernel)
        });
        let kernel =
            started.inspect_err(|error| tracing::warn!(%error, "folders of ack files are polled, not watched")).ok();
        Arc::new(Self { kernel, folders })
    }

    /// Watches a folder. `None` if the kernel cannot.
    pub(crate) fn watch(self: &Arc<Self>, folder: &Path) -> Option<WatchedFolder> {
        // Both say that a file is complete, which its creation does not.
        let flags = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO;
        // Held, so that no event comes before the entry.
        let mut folders = self.lock();
        let id = inotify::add_watch(self.kernel.as_ref()?, folder, flags).ok()?;
        let changed = Arc::<Notify>::default();
        folders.insert(id, changed.clone());
        drop(folders);
        Some(WatchedFolder { watch: self.clone(), id, changed })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Arc<Notify>>> {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes events on to the agents that watch.
fn pass_on(kernel: &OwnedFd, folders: &Folders) {
    let mut buffer = [MaybeUninit::uninit(); BUFFER];
    let mut reader = inotify::Reader::new(kernel, &mut buffer);
    loop {
        match reader.next() {
            Ok(event) => {
                if let Some(changed) = folders.lock().unwrap_or_else(PoisonError::into_inner).get(&event.wd()) {
                    changed.notify_one();
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "the watch of folders has ended, ack files are polled");
                return;
            }
        }
    }
}

impl Drop for WatchedFolder {
    fn drop(&mut self) {
        // Held, so that no other begins to watch in between.
        let mut folders = self.watch.lock();
        // A folder has one watch in the kernel: the next agent of the name has taken it over if it started before this
        // end.
        let is_own = folders.get(&self.id).is_some_and(|changed| Arc::ptr_eq(changed, &self.changed));
        if is_own {
            folders.remove(&self.id);
            if let Some(kernel) = &self.watch.kernel {
                // The folder may have been removed, and its watch with it.
                let _ = inotify::remove_watch(kernel, self.id);
            }
        }
    }
}

/// Waits for a change; for ever without a watch.
pub(crate) async fn folder_changed(folder: Option<&WatchedFolder>) {
    match folder {
        Some(folder) => folder.changed.notified().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_new_file_is_noticed_until_the_folder_is_dropped() {
        let home = tempfile::tempdir().expect("a folder");
        let watch = FolderWatch::new();
        let folder = watch.watch(home.path()).expect("a watch");
        std::fs::write(home.path().join("d1"), "x").expect("a file");
        timeout(Duration::from_secs(10), folder_changed(Some(&folder))).await.expect("a notification");
        drop(folder);
        assert!(watch.lock().is_empty());
    }

    #[tokio::test]
    async fn the_end_of_an_agent_leaves_its_successor_the_watch() {
        let home = tempfile::tempdir().expect("a folder");
        let watch = FolderWatch::new();
        let first = watch.watch(home.path()).expect("a watch");
        let second = watch.watch(home.path()).expect("a watch");
        drop(first);
        std::fs::write(home.path().join("d1"), "x").expect("a file");
        timeout(Duration::from_secs(10), folder_changed(Some(&second))).await.expect("a notification");
        drop(second);
        assert!(watch.lock().is_empty());
    }
}
