//! Resource usage of the stack's processes, read from /proc.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::time::Instant;

use serde::Serialize;

/// Unit of /proc times on every supported Linux architecture (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// Relevant fields of `/proc/<pid>/stat`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    parent: u32,
    /// User and system time of the process.
    own: u64,
    /// User and system time of its reaped children.
    reaped: u64,
}

fn parse_stat(stat: &str) -> Option<Stat> {
    // The command may contain spaces and parentheses; the last parenthesis closes it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let parent = u32::try_from(number(1)?).ok()?;
    Some(Stat { parent, own: number(11)? + number(12)?, reaped: number(13)? + number(14)? })
}

/// Parses the busy ticks of the machine from the first line of `/proc/stat`: user, nice, system, irq, softirq.
fn parse_machine(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    [0, 1, 2, 5, 6].into_iter().map(|index| fields.get(index).copied()).sum()
}

/// Resident memory by kind, from `/proc/<pid>/status`, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Resident {
    anonymous: u64,
    file: u64,
    shared: u64,
}

fn parse_status(status: &str) -> Resident {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let of = |name| field(name).unwrap_or(0);
    Resident { anonymous: of("RssAnon"), file: of("RssFile"), shared: of("RssShmem") }
}

/// Root processes by name; each includes its descendants (such as Postgres' backends).
pub(crate) type Roots = BTreeMap<String, u32>;

/// CPU counters of the stack, the generator and the machine at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    trees: BTreeMap<String, (u32, u64)>,
    generator: u64,
    machine: u64,
    at: Instant,
}

impl Sample {
    /// Reads the current counters.
    pub(crate) fn now(roots: &Roots) -> Self {
        let stats = all_stats();
        let trees = roots.iter().map(|(name, pid)| {
            let ticks =
                tree(&stats, *pid).iter().filter_map(|pid| stats.get(pid)).map(|stat| stat.own + stat.reaped).sum();
            (name.clone(), (*pid, ticks))
        });
        // A killed gateway is a reaped child of the generator, not its own work.
        let own = fs::read_to_string("/proc/self/stat").ok().and_then(|stat| parse_stat(&stat));
        let machine = fs::read_to_string("/proc/stat").ok().and_then(|stat| parse_machine(&stat));
        Self {
            trees: trees.collect(),
            generator: own.map_or(0, |stat| stat.own),
            machine: machine.unwrap_or(0),
            at: Instant::now(),
        }
    }

    /// Returns the usage since `earlier`. A root with a new pid is counted from its own start.
    pub(crate) fn since(&self, earlier: &Self) -> Cpu {
        let stack: BTreeMap<String, f64> = self
            .trees
            .iter()
            .map(|(name, (pid, ticks))| {
                let before = earlier.trees.get(name).filter(|(other, _)| other == pid).map_or(0, |(_, t)| *t);
                (name.clone(), seconds(ticks.saturating_sub(before)))
            })
            .collect();
        let generator = seconds(self.generator.saturating_sub(earlier.generator));
        let machine = seconds(self.machine.saturating_sub(earlier.machine));
        Cpu {
            others: (machine - generator - stack.values().sum::<f64>()).max(0.0),
            stack,
            generator,
            wall_seconds: (self.at - earlier.at).as_secs_f64(),
        }
    }
}

/// CPU seconds of a window.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Cpu {
    /// By process of the stack, Postgres with its backends.
    pub(crate) stack: BTreeMap<String, f64>,
    /// Usage of the load generator itself.
    pub(crate) generator: f64,
    /// Usage of all other processes on the machine.
    pub(crate) others: f64,
    /// Length of the window.
    pub(crate) wall_seconds: f64,
}

impl Cpu {
    /// Returns the sum over all processes of the stack.
    pub(crate) fn stack_total(&self) -> f64 {
        self.stack.values().sum()
    }
}

/// Returns the resident memory by root in KiB. Memory shared within a process tree is counted once, as its largest
/// value.
pub(crate) fn resident_kib(roots: &Roots) -> BTreeMap<String, u64> {
    let stats = all_stats();
    let of = |pid: &u32| {
        let mut total = Resident::default();
        for pid in tree(&stats, *pid) {
            let one = parse_status(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default());
            total.anonymous += one.anonymous;
            total.file = total.file.max(one.file);
            total.shared = total.shared.max(one.shared);
        }
        total.anonymous + total.file + total.shared
    };
    roots.iter().map(|(name, pid)| (name.clone(), of(pid))).collect()
}

fn all_stats() -> HashMap<u32, Stat> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return HashMap::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| Some((pid, parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect()
}

/// Returns `root` and all its descendants.
fn tree(stats: &HashMap<u32, Stat>, root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(stats.iter().filter(|(_, stat)| stat.parent == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / TICKS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_parses_a_command_name_with_parentheses() {
        let line = "77 (a) b (c) S 12 77 77 0 -1 4194560 100 0 0 0 30 20 7 3 20 0 9 0 555 1 2";
        assert_eq!(parse_stat(line), Some(Stat { parent: 12, own: 50, reaped: 10 }));
        assert_eq!(parse_stat("77 (x) S 12"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn the_machine_is_busy_without_idle_and_iowait() {
        assert_eq!(parse_machine("cpu  10 1 5 900 50 2 3 0 0 0\ncpu0 1 2 3"), Some(21));
        assert_eq!(parse_machine("intr 1"), None);
    }

    #[test]
    fn memory_is_read_by_kind() {
        let status = "Name:\tx\nVmRSS:\t  30 kB\nRssAnon:\t      10 kB\nRssFile:\t  15 kB\nRssShmem:\t 5 kB\n";
        assert_eq!(parse_status(status), Resident { anonymous: 10, file: 15, shared: 5 });
        assert_eq!(parse_status(""), Resident::default());
    }

    #[test]
    fn a_process_tree_contains_grandchildren_and_no_unrelated_processes() {
        let of = |parent| Stat { parent, own: 0, reaped: 0 };
        let stats = HashMap::from([(1, of(0)), (2, of(1)), (3, of(2)), (4, of(9))]);
        let mut found = tree(&stats, 1);
        found.sort_unstable();
        assert_eq!(found, [1, 2, 3]);
    }

    #[test]
    fn a_restarted_process_is_counted_from_its_start() {
        let sample = |pid, ticks, machine| Sample {
            trees: BTreeMap::from([("nats".to_owned(), (pid, ticks))]),
            generator: 0,
            machine,
            at: Instant::now(),
        };
        let cpu = sample(5, 300, 1000).since(&sample(5, 100, 500));
        assert_eq!((cpu.stack_total(), cpu.others), (2.0, 3.0));
        assert_eq!(sample(6, 300, 1000).since(&sample(5, 100, 500)).stack_total(), 3.0);
    }
}
