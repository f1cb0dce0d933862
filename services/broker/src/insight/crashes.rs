//! [`CrashLog`]: ends of agents that were no clean ends, kept over restarts in `crash-insights.json`.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{
    api::types::{CrashCategory, CrashInsights, CrashPattern, CrashRecord},
    metric_names,
    state::{read_versioned, write_versioned},
};

/// Version of the file.
const VERSION: u32 = 1;

const REMEMBERED: usize = 500;
const HOUR_MS: i64 = 3_600_000;

/// The last 500 crashes.
#[derive(Debug)]
pub(crate) struct CrashLog {
    path: PathBuf,
    content: Mutex<Content>,
    /// Held during a write of the file.
    writing: Mutex<()>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct Content {
    total: u64,
    recent: VecDeque<CrashRecord>,
}

impl CrashLog {
    /// Reads the crashes under earlier brokers.
    ///
    /// # Errors
    /// If the file cannot be read, or a newer broker has written it.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let content = read_versioned(&path, VERSION)?.unwrap_or_default();
        Ok(Self { path, content: Mutex::new(content), writing: Mutex::default() })
    }

    /// Writes the file. Blocks.
    pub(crate) fn write(&self) -> Result<()> {
        // Before the content is read, so that an older one never replaces a newer one. Not the lock of the content,
        // which the tasks of agents take: the disk may be slow.
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let content = self.lock().clone();
        write_versioned(&self.path, VERSION, &content)
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an end by a signal or with a code that is not 0.
    pub(crate) fn record(&self, agent: &str, code: Option<i32>, signal: Option<i32>, uptime_secs: u64, now_ms: i64) {
        let category = category_of(code, signal);
        let description = match (code, signal) {
            (_, Some(signal)) => format!("ended by signal {signal} after {uptime_secs} s"),
            (Some(code), None) => format!("exit code {code} after {uptime_secs} s"),
            (None, None) => format!("ended in an unknown way after {uptime_secs} s"),
        };
        let mut content = self.lock();
        content.total += 1;
        content.recent.push_back(CrashRecord {
            agent_name: agent.to_owned(),
            exit_code: code,
            signal: signal.map(|signal| signal.to_string()),
            timestamp: now_ms,
            uptime_secs,
            category,
            description,
        });
        if content.recent.len() > REMEMBERED {
            content.recent.pop_front();
        }
        metrics::counter!(metric_names::CRASHES, "category" => category.as_str()).increment(1);
    }

    /// Number of crashes.
    pub(crate) fn total(&self) -> u64 {
        self.lock().total
    }

    /// Summary at `now_ms`.
    pub(crate) fn insights(&self, now_ms: i64) -> CrashInsights {
        let Content { total, recent } = self.lock().clone();
        let recent: Vec<CrashRecord> = recent.into();
        let mut by_category: BTreeMap<CrashCategory, Vec<String>> = BTreeMap::new();
        for crash in &recent {
            by_category.entry(crash.category).or_default().push(crash.agent_name.clone());
        }
        let pattern = |(category, mut agents): (CrashCategory, Vec<String>)| {
            let count = agents.len();
            agents.sort_unstable();
            agents.dedup();
            CrashPattern { category, count, agents }
        };
        let last_hour = recent.iter().filter(|crash| crash.timestamp > now_ms - HOUR_MS).count();
        // Ten crashes or more make it 0.
        let health_score = (100 - 10 * i64::try_from(last_hour).unwrap_or(10)).max(0);
        CrashInsights {
            total_crashes: total,
            recent,
            patterns: by_category.into_iter().map(pattern).collect(),
            health_score,
        }
    }
}

/// Kind of the crash behind an end.
fn category_of(code: Option<i32>, signal: Option<i32>) -> CrashCategory {
    match (code, signal) {
        // Shells report a signal as 128 plus its number. Ends of released agents are not recorded, so signal 9 is most
        // likely from the kernel for lack of memory.
        (_, Some(11)) | (Some(139), _) => CrashCategory::Segfault,
        (_, Some(9)) | (Some(137), _) => CrashCategory::Oom,
        (_, Some(_)) => CrashCategory::Signal,
        (_, None) => CrashCategory::Error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crashes_are_classified_and_lower_the_score_for_an_hour() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("crash-insights.json");
        let log = CrashLog::open(path.clone()).expect("a log");
        for (code, signal) in [(None, Some(11)), (Some(137), None), (None, Some(15)), (Some(1), None)] {
            log.record("ada", code, signal, 5, 1000);
        }
        let insights = log.insights(1000);
        let categories: Vec<_> = insights.recent.iter().map(|crash| crash.category.as_str()).collect();
        assert_eq!(categories, ["segfault", "oom", "signal", "error"]);
        assert_eq!((insights.total_crashes, insights.health_score), (4, 60));
        assert_eq!(log.insights(1000 + HOUR_MS).health_score, 100);
        assert_eq!(insights.patterns[0].agents, ["ada"]);
        log.write().expect("a file");
        assert_eq!(CrashLog::open(path).expect("a log").insights(1000).recent, insights.recent);
    }

    #[test]
    fn crashes_at_the_same_time_are_all_in_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("crash-insights.json");
        let log = CrashLog::open(path.clone()).expect("a log");
        std::thread::scope(|scope| {
            for agent in ["ada", "bob", "eve", "joe"] {
                let log = &log;
                scope.spawn(move || {
                    for _ in 0..10 {
                        log.record(agent, Some(1), None, 5, 1000);
                        log.write().expect("a file");
                    }
                });
            }
        });
        assert_eq!(CrashLog::open(path).expect("a log").total(), 40);
    }
}
