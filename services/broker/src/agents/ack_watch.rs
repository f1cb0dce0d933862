//! [`AckWatch`]: the operating system's notification of changes in folders of ack files. Without it they are polled.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;

type Folders = Arc<Mutex<HashMap<PathBuf, Arc<Notify>>>>;

/// One watcher for the folders of all agents.
#[derive(Debug)]
pub(crate) struct AckWatch {
    watcher: Mutex<Option<RecommendedWatcher>>,
    folders: Folders,
}

/// A folder that is watched until this is dropped.
#[derive(Debug)]
pub(super) struct WatchedFolder {
    watch: Arc<AckWatch>,
    path: PathBuf,
    /// Notified of each change.
    pub(super) changed: Arc<Notify>,
}

impl AckWatch {
    pub(crate) fn new() -> Arc<Self> {
        let folders = Folders::default();
        let known = folders.clone();
        let created = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let Ok(event) = event else { return };
            let known = known.lock().unwrap_or_else(PoisonError::into_inner);
            let folders = event.paths.iter().filter_map(|path| known.get(path.parent()?));
            folders.for_each(|changed| changed.notify_one());
        });
        let watcher = created.inspect_err(|error| tracing::warn!(%error, "ack files are polled, not watched")).ok();
        Arc::new(Self { watcher: Mutex::new(watcher), folders })
    }

    /// Watches a folder. `None` if the system cannot: network file systems, too many watches.
    pub(super) fn watch(self: &Arc<Self>, folder: &Path) -> Option<WatchedFolder> {
        let path = folder.canonicalize().ok()?;
        let mut watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        watcher.as_mut()?.watch(&path, RecursiveMode::NonRecursive).ok()?;
        let changed = Arc::<Notify>::default();
        self.folders.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone(), changed.clone());
        Some(WatchedFolder { watch: self.clone(), path, changed })
    }
}

impl Drop for WatchedFolder {
    fn drop(&mut self) {
        self.watch.folders.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
        if let Some(watcher) = self.watch.watcher.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // The folder may have been removed.
            let _ = watcher.unwatch(&self.path);
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
        let folder = watch.watch(home.path()).expect("a watch");
        std::fs::write(home.path().join("d1"), "x").expect("a file");
        timeout(Duration::from_secs(10), changed(Some(&folder))).await.expect("a notification");
        drop(folder);
        assert!(watch.folders.lock().expect("no panic").is_empty());
    }
}
