//! The processes of a terminal: the program and everything that descends from it.
//!
//! A descendant is recognised by any of: the program's session; a parent that is recognised; an earlier scan that saw
//! it; the marker in its environment, if it was orphaned and adopted by this process. Only a process that is orphaned
//! in a session of its own, with an emptied environment, before any scan saw it, escapes its terminal; it is ended
//! with the host.

mod end;
mod reaper;
mod scan;

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    sync::Mutex,
    time::Duration,
};

pub(crate) use end::Selection;
pub use end::{EndReport, Leftover};
pub(crate) use reaper::run as run_reaper;
pub(crate) use scan::Trees;

use crate::{
    ProcessIdentity,
    linux::{ProcessEntry, ProcessTable},
    terminal::lock,
};

/// Resources of a terminal's processes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeUsage {
    /// Processes.
    pub processes: usize,
    /// Threads of all of them.
    pub threads: u64,
    /// Resident memory. Pages that several of them share count for each.
    pub resident_bytes: u64,
    /// Processor time that the living processes have used.
    pub cpu: Duration,
}

/// Identity of the processes of one terminal.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) root: ProcessIdentity,
    pub(crate) marker: OsString,
    /// Members that the last scan saw. A member stays one when its parent ends.
    known: Mutex<HashSet<ProcessIdentity>>,
}

impl Tree {
    pub(crate) fn new(root: ProcessIdentity, marker: OsString) -> Self {
        Self { root, marker, known: Mutex::default() }
    }

    /// Members in this scan, ended ones that wait to be reaped included.
    pub(crate) fn members<'a>(&self, table: &'a ProcessTable) -> Vec<&'a ProcessEntry> {
        let mut known = lock(&self.known);
        // Another process with the root's id: then nothing is left of the session that had this id as well.
        let session_reused = table.entries.get(&self.root.pid).is_some_and(|entry| entry.identity != self.root);
        // The kernel shows a process that is being released with the session -1, which is the id of `NONE`.
        let has_session = self.root != ProcessIdentity::NONE && !session_reused;
        let is_seed = |entry: &ProcessEntry| {
            entry.identity == self.root
                || (entry.session == self.root.pid && has_session)
                || known.contains(&entry.identity)
                || entry.marker.as_ref() == Some(&self.marker)
        };
        let members = with_descendants(table, is_seed);
        // Replaced, not extended: the set stays as small as the tree.
        *known = members.iter().map(|entry| entry.identity).collect();
        members
    }

    pub(crate) fn usage(&self, table: &ProcessTable) -> TreeUsage {
        let living = self.members(table).into_iter().filter(|entry| !entry.zombie);
        living.fold(TreeUsage::default(), |sum, entry| TreeUsage {
            processes: sum.processes + 1,
            threads: sum.threads + entry.threads,
            resident_bytes: sum.resident_bytes + entry.resident_bytes,
            cpu: sum.cpu + entry.cpu,
        })
    }
}

/// Processes that are seeds or descend from one. Never this process.
fn with_descendants(table: &ProcessTable, is_seed: impl Fn(&ProcessEntry) -> bool) -> Vec<&ProcessEntry> {
    let mut children: HashMap<i32, Vec<&ProcessEntry>> = HashMap::new();
    for entry in table.entries.values() {
        children.entry(entry.parent).or_default().push(entry);
    }
    let own = |entry: &ProcessEntry| entry.identity.pid == table.own_pid;
    let mut open: Vec<&ProcessEntry> = table.entries.values().filter(|entry| is_seed(entry)).collect();
    let (mut seen, mut members) = (HashSet::new(), Vec::new());
    while let Some(entry) = open.pop() {
        // Several seeds may lead to the same process, and this process must never be among those that are ended.
        if own(entry) || !seen.insert(entry.identity) {
            continue;
        }
        members.push(entry);
        open.extend(children.get(&entry.identity.pid).into_iter().flatten());
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: i32 = 10;

    fn entry(pid: i32, parent: i32, session: i32, marker: Option<&str>) -> ProcessEntry {
        ProcessEntry {
            identity: ProcessIdentity { pid, start_ticks: 1 },
            parent,
            session,
            zombie: false,
            cpu: Duration::from_secs(1),
            resident_bytes: 10,
            threads: 2,
            marker: marker.map(Into::into),
        }
    }

    fn table(entries: impl IntoIterator<Item = ProcessEntry>) -> ProcessTable {
        let entries = entries.into_iter().map(|entry| (entry.identity.pid, entry)).collect();
        ProcessTable { entries, own_pid: OWN, own_session: 1 }
    }

    fn pids(tree: &Tree, table: &ProcessTable) -> Vec<i32> {
        let mut pids: Vec<i32> = tree.members(table).iter().map(|entry| entry.identity.pid).collect();
        pids.sort_unstable();
        pids
    }

    fn tree() -> Tree {
        Tree::new(ProcessIdentity { pid: 100, start_ticks: 1 }, "mine".into())
    }

    #[test]
    fn members_are_found_by_session_descent_and_marker() {
        let table = table([
            entry(OWN, 1, 1, Some("mine")),
            entry(100, OWN, 100, None),
            entry(101, 100, 101, None),
            entry(102, OWN, 100, None),
            entry(103, OWN, 103, Some("mine")),
            entry(104, 103, 104, None),
            entry(200, OWN, 200, Some("other")),
            entry(201, 200, 200, None),
            entry(300, 1, 300, None),
        ]);
        assert_eq!(pids(&tree(), &table), [100, 101, 102, 103, 104]);
        let usage = tree().usage(&table);
        assert_eq!(usage, TreeUsage { processes: 5, threads: 10, resident_bytes: 50, cpu: Duration::from_secs(5) });
    }

    #[test]
    fn a_member_that_loses_its_parent_stays_one() {
        let tree = tree();
        pids(&tree, &table([entry(100, OWN, 100, None), entry(101, 100, 101, None)]));
        assert_eq!(pids(&tree, &table([entry(101, OWN, 101, None)])), [101]);
        let mut reused = entry(101, OWN, 101, None);
        reused.identity.start_ticks = 2;
        assert_eq!(pids(&tree, &table([reused])), [0; 0]);
    }

    #[test]
    fn a_reused_process_id_is_not_the_root() {
        let mut reused = entry(100, OWN, 100, None);
        reused.identity.start_ticks = 2;
        assert_eq!(pids(&tree(), &table([reused, entry(101, 100, 100, None)])), [0; 0]);
    }

    #[test]
    fn a_tree_without_a_root_has_only_marked_processes_and_their_descendants() {
        let tree = Tree::new(ProcessIdentity::NONE, "mine".into());
        let table = table([
            // One that is being released, and a child that it has not lost yet.
            entry(200, 1, -1, None),
            entry(201, 200, 200, None),
            entry(300, 1, 300, Some("mine")),
            entry(301, 300, 301, None),
        ]);
        assert_eq!(pids(&tree, &table), [300, 301]);
    }
}
