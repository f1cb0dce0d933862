//! Scans of the process table, shared by all who ask at the same time, and the programs that are running.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    io,
    sync::{Arc, Mutex},
};

use tokio::time::Instant;

use super::{Tree, TreeUsage};
use crate::{
    ProcessIdentity, PtyError,
    linux::{ProcessTable, Scope},
    terminal::{Shared, lock},
};

/// The process trees of all terminals of a host.
pub(crate) struct Trees {
    marker_variable: OsString,
    /// Terminals whose program was not reaped yet, by its process id.
    running: Mutex<HashMap<i32, Arc<Shared>>>,
    /// The last scan. Its lock lets one scan run at a time, so that at most one thread is busy with it.
    last: tokio::sync::Mutex<Option<(Instant, Arc<ProcessTable>)>>,
}

impl Trees {
    pub(crate) fn new(marker_variable: OsString) -> Self {
        Self { marker_variable, running: Mutex::default(), last: tokio::sync::Mutex::default() }
    }

    pub(crate) fn insert(&self, shared: Arc<Shared>) {
        lock(&self.running).insert(shared.tree.root.pid, shared);
    }

    pub(crate) fn remove(&self, root: ProcessIdentity) {
        let mut running = lock(&self.running);
        // The program was reaped before: its id may already belong to a terminal that was started since.
        if running.get(&root.pid).is_some_and(|shared| shared.tree.root == root) {
            running.remove(&root.pid);
        }
    }

    pub(crate) fn running(&self) -> Vec<Arc<Shared>> {
        lock(&self.running).values().cloned().collect()
    }

    pub(crate) fn roots(&self) -> HashSet<i32> {
        lock(&self.running).keys().copied().collect()
    }

    /// A scan that began after this call.
    pub(crate) async fn scan(&self) -> Result<Arc<ProcessTable>, PtyError> {
        let asked_at = Instant::now();
        let mut last = self.last.lock().await;
        // Another caller may have scanned while this one waited for the lock.
        if let Some((began_at, table)) = &*last
            && *began_at >= asked_at
        {
            return Ok(table.clone());
        }
        let began_at = Instant::now();
        let table = Arc::new(self.read(Scope::Adopted { roots: self.roots() }).await?);
        *last = Some((began_at, table.clone()));
        Ok(table)
    }

    /// A scan of every environment.
    pub(crate) async fn scan_everything(&self) -> Result<Arc<ProcessTable>, PtyError> {
        let _one_at_a_time = self.last.lock().await;
        Ok(Arc::new(self.read(Scope::Everything).await?))
    }

    async fn read(&self, scope: Scope) -> Result<ProcessTable, PtyError> {
        let marker_variable = self.marker_variable.clone();
        // It blocks for milliseconds where many processes run, in which this thread could serve no terminal.
        let read = tokio::task::spawn_blocking(move || ProcessTable::read(&marker_variable, &scope)).await;
        read.unwrap_or_else(|failed| Err(io::Error::other(failed))).map_err(PtyError::ProcessTable)
    }

    pub(crate) async fn usage(&self, tree: &Tree) -> Result<TreeUsage, PtyError> {
        Ok(tree.usage(&*self.scan().await?))
    }

    /// Usage of every running terminal, from one scan.
    pub(crate) async fn all_usage(&self) -> Result<HashMap<ProcessIdentity, TreeUsage>, PtyError> {
        let table = self.scan().await?;
        Ok(self.running().iter().map(|shared| (shared.tree.root, shared.tree.usage(&table))).collect())
    }
}
