//! [`CrashLog`]: ends of agents that were no clean ends.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
};

use crate::metric_names;
use serde::Serialize;

const REMEMBERED: usize = 500;
const HOUR_MS: i64 = 3_600_000;

/// One crash.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CrashRecord {
    pub(crate) agent_name: String,
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<String>,
    /// Unix time in milliseconds.
    pub(crate) timestamp: i64,
    pub(crate) uptime_secs: u64,
    pub(crate) category: &'static str,
    pub(crate) description: String,
}

/// Crashes with the same category.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CrashPattern {
    category: &'static str,
    count: usize,
    agents: Vec<String>,
}

/// Summary for drivers.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CrashInsights {
    total_crashes: u64,
    recent: Vec<CrashRecord>,
    patterns: Vec<CrashPattern>,
    health_score: i64,
}

/// The last 500 crashes.
#[derive(Debug, Default)]
pub(crate) struct CrashLog {
    content: Mutex<(u64, VecDeque<CrashRecord>)>,
}

impl CrashLog {
    /// Records an end by a signal or with a code that is not 0.
    pub(crate) fn record(&self, agent: &str, code: Option<i32>, signal: Option<i32>, uptime_secs: u64, now_ms: i64) {
        let category = match (code, signal) {
            (_, Some(11)) | (Some(139), _) => "segfault",
            (_, Some(9)) | (Some(137), _) => "oom",
            (_, Some(_)) => "signal",
            (_, None) => "error",
        };
        let description = match (code, signal) {
            (_, Some(signal)) => format!("ended by signal {signal} after {uptime_secs} s"),
            (code, None) => format!("exit code {} after {uptime_secs} s", code.unwrap_or_default()),
        };
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        content.0 += 1;
        content.1.push_back(CrashRecord {
            agent_name: agent.to_owned(),
            exit_code: code,
            signal: signal.map(|signal| signal.to_string()),
            timestamp: now_ms,
            uptime_secs,
            category,
            description,
        });
        if content.1.len() > REMEMBERED {
            content.1.pop_front();
        }
        metrics::counter!(metric_names::CRASHES, "category" => category).increment(1);
    }

    /// Number of crashes since the start.
    pub(crate) fn total(&self) -> u64 {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Summary at `now_ms`.
    pub(crate) fn insights(&self, now_ms: i64) -> CrashInsights {
        let content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        let (total_crashes, recent) = (content.0, content.1.iter().cloned().collect::<Vec<_>>());
        let mut by_category: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        for crash in &recent {
            by_category.entry(crash.category).or_default().push(crash.agent_name.clone());
        }
        let pattern = |(category, mut agents): (&'static str, Vec<String>)| {
            let count = agents.len();
            agents.sort_unstable();
            agents.dedup();
            CrashPattern { category, count, agents }
        };
        let last_hour = recent.iter().filter(|crash| crash.timestamp > now_ms - HOUR_MS).count();
        let health_score = (100 - 10 * i64::try_from(last_hour).unwrap_or(10)).max(0);
        CrashInsights { total_crashes, recent, patterns: by_category.into_iter().map(pattern).collect(), health_score }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crashes_are_classified_and_lower_the_score_for_an_hour() {
        let log = CrashLog::default();
        for (code, signal) in [(None, Some(11)), (Some(137), None), (None, Some(15)), (Some(1), None)] {
            log.record("ada", code, signal, 5, 1000);
        }
        let insights = log.insights(1000);
        let categories: Vec<_> = insights.recent.iter().map(|crash| crash.category).collect();
        assert_eq!(categories, ["segfault", "oom", "signal", "error"]);
        assert_eq!((insights.total_crashes, insights.health_score), (4, 60));
        assert_eq!(log.insights(1000 + HOUR_MS).health_score, 100);
        assert_eq!(insights.patterns[0].agents, ["ada"]);
    }
}
