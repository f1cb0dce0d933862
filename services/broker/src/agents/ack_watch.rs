//! [`AckWatch`]: the kernel's notification of changes in folders of ack files. Without it they are polled.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, sync::Notify};

/// Room for the events of one read.
const BUFFER: usize = 4096;

type Folders = HashMap<i32, Arc<Notify>>;

/// One watch for the folders of all agents.
#[derive(Debug)]
pub(crate) struct AckWatch {
    /// Absent where the kernel gives none: too many in use.
    kernel: Option<AsyncFd<OwnedFd>>,
    folders: Mutex<Folders>,
}

/// A folder that is watched until this is dropped.
#[derive(Debug)]
pub(super) struct WatchedFolder {
    watch: Arc<AckWatch>,
    id: i32,
    changed: Arc<Notify>,
}

impl AckWatch {
    pub(crate) fn new() -> Arc<Self> {
        let created = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(std::io::Error::from);
        let kernel = created.and_then(AsyncFd::new);
        let kernel = kernel.inspect_err(|error| tracing::warn!(%error, "ack files are polled, not watched")).ok();
        Arc::new(Self { kernel, folders: Mutex::default() })
    }

    /// Passes events on, without an end.
    pub(crate) async fn run(self: Arc<Self>) {
        let Some(kernel) = &self.kernel else { return std::future::pending().await };
        loop {
            let Ok(mut guard) = kernel.readable().await else { return };
            let mut buffer = [MaybeUninit::uninit(); BUFFER];
            let mut reader = inotify::Reader::new(kernel.get_ref(), &mut buffer);
            loop {
                match reader.next() {
                    Ok(event) => {
                        if let Some(changed) = self.lock().get(&event.wd()) {
                            changed.notify_one();
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(_) => break,
                }
            }
            guard.clear_ready();
        }
    }

    /// Watches a folder. `None` if the kernel cannot.
    pub(super) fn watch(self: &Arc<Self>, folder: &Path) -> Option<WatchedFolder> {
        let flags = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO;
        // Held, so that no event comes before the entry.
        let mut folders = self.lock();
        let id = inotify::add_watch(self.kernel.as_ref()?.get_ref(), folder, flags).ok()?;
        let changed = Arc::<Notify>::default();
        folders.insert(id, changed.clone());
        drop(folders);
        Some(WatchedFolder { watch: self.clone(), id, changed })
    }

    fn lock(&self) -> MutexGuard<'_, Folders> {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WatchedFolder {
    fn drop(&mut self) {
        self.watch.lock().remove(&self.id);
        if let Some(kernel) = &self.watch.kernel {
            // The folder may have been removed, and its watch with it.
            let _ = inotify::remove_watch(kernel.get_ref(), self.id);
        }
    }
}

/// Waits for a change; for ever without a watch.
pub(super) async fn changed(folder: Option<&WatchedFolder>) {
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
        let watch = AckWatch::new();
        let running = tokio::spawn(watch.clone().run());
        let folder = watch.watch(home.path()).expect("a watch");
        std::fs::write(home.path().join("d1"), "x").expect("a file");
        timeout(Duration::from_secs(10), changed(Some(&folder))).await.expect("a notification");
        drop(folder);
        assert!(watch.lock().is_empty());
        running.abort();
    }
}
