//! Figures of verification.

use std::collections::BTreeMap;

use serde::Serialize;

/// Entry of `GET /api/verification`: one agent program in one version.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct ProgramReport {
    pub(crate) harness: String,
    pub(crate) version: String,
    #[serde(flatten)]
    pub(crate) figures: VerificationReport,
}

/// Figures of an agent program or of one agent. Shares are null without a delivery.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct VerificationReport {
    pub(crate) deliveries: u64,
    pub(crate) verified_percent: Option<f64>,
    pub(crate) verified_by_method_percent: BTreeMap<String, Option<f64>>,
    pub(crate) unverified_percent: Option<f64>,
    pub(crate) failed_percent: Option<f64>,
    pub(crate) verify_ms: Latencies,
    pub(crate) attempts_per_delivery: Option<f64>,
    pub(crate) retries_suppressed: BTreeMap<String, u64>,
    pub(crate) file_ack_percent: Option<f64>,
    pub(crate) mcp_ack_percent: Option<f64>,
    pub(crate) learned: Option<LearnedReport>,
    pub(crate) recommendations: Vec<String>,
}

/// Percentiles of the time until a delivery was verified.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Latencies {
    pub(crate) p50: Option<u64>,
    pub(crate) p95: Option<u64>,
}

/// Conclusions about an agent program.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LearnedReport {
    pub(crate) echo_reliable: bool,
    pub(crate) echo_window_ms: u64,
}
