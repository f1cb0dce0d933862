//! Crashes of agents.

use serde::{Deserialize, Serialize};

/// Kind of a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CrashCategory {
    Segfault,
    Oom,
    Signal,
    Error,
}

impl CrashCategory {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Segfault => "segfault",
            Self::Oom => "oom",
            Self::Signal => "signal",
            Self::Error => "error",
        }
    }
}

/// A crash. The file of crashes keeps the same records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CrashRecord {
    pub(crate) agent_name: String,
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<String>,
    /// Unix time in milliseconds.
    pub(crate) timestamp: i64,
    pub(crate) uptime_secs: u64,
    pub(crate) category: CrashCategory,
    pub(crate) description: String,
}

/// Crashes with the same category.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CrashPattern {
    pub(crate) category: CrashCategory,
    pub(crate) count: usize,
    pub(crate) agents: Vec<String>,
}

/// Answer of `GET /api/crash-insights`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CrashInsights {
    pub(crate) total_crashes: u64,
    pub(crate) recent: Vec<CrashRecord>,
    pub(crate) patterns: Vec<CrashPattern>,
    pub(crate) health_score: i64,
}
