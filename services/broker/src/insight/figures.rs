//! [`VerificationFigures`]: results of deliveries to one agent program, or to one agent.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use relay_verification::strategy::{DeliveryRecord, Learned, SHORT_ECHO_WINDOW};
use serde::{Deserialize, Serialize};

use crate::{
    api::types::{Latencies, LearnedReport, VerificationReport},
    clock,
};

/// Deliveries over which times and the adoption of acks are taken.
const SAMPLE: usize = 500;
/// An adoption from which on a change is recommended, in per cent.
const ADOPTED: f64 = 90.0;
/// A share of unverified deliveries from which on a look is recommended, in per cent.
const MANY_UNVERIFIED: f64 = 20.0;
/// Deliveries before anything is recommended.
const EVIDENCE: u64 = 20;

/// Final outcome of one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Signal of this method, with its delay in milliseconds.
    Verified {
        method: &'static str,
        latency_ms: u64,
    },
    Unverified,
    Failed,
}

/// Counts and samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct VerificationFigures {
    verified: BTreeMap<String, u64>,
    unverified: u64,
    failed: u64,
    attempts: u64,
    retries_suppressed: BTreeMap<String, u64>,
    latencies_ms: VecDeque<u64>,
    file_acks: VecDeque<bool>,
    mcp_acks: VecDeque<bool>,
}

impl VerificationFigures {
    /// Records the outcome of a delivery, with the number of its injections.
    pub(crate) fn on_outcome(&mut self, outcome: Outcome, attempts: u32) {
        self.attempts += u64::from(attempts);
        match outcome {
            Outcome::Verified { method, latency_ms } => {
                *self.verified.entry(method.to_owned()).or_default() += 1;
                push(&mut self.latencies_ms, latency_ms);
            }
            Outcome::Unverified => self.unverified += 1,
            Outcome::Failed => self.failed += 1,
        }
    }

    /// Takes the signals of a delivery whose window is over.
    pub(crate) fn on_record(&mut self, record: DeliveryRecord) {
        push(&mut self.file_acks, record.has_file_ack);
        push(&mut self.mcp_acks, record.has_api_ack);
    }

    /// A message was not typed again, for this reason.
    pub(crate) fn on_suppressed(&mut self, reason: &'static str) {
        *self.retries_suppressed.entry(reason.to_owned()).or_default() += 1;
    }

    /// Figures for drivers, with what was learned of the program.
    pub(crate) fn report(&self, learned: Option<&Learned>) -> VerificationReport {
        let verified: u64 = self.verified.values().sum();
        let deliveries = verified + self.unverified + self.failed;
        let percent = |count: u64| share(count, deliveries);
        let by_method: BTreeMap<String, Option<f64>> =
            self.verified.iter().map(|(method, count)| (method.clone(), percent(*count))).collect();
        VerificationReport {
            deliveries,
            verified_percent: percent(verified),
            verified_by_method_percent: by_method,
            unverified_percent: percent(self.unverified),
            failed_percent: percent(self.failed),
            verify_ms: Latencies { p50: self.latency(50), p95: self.latency(95) },
            attempts_per_delivery: (deliveries > 0).then(|| rounded(self.attempts as f64 / deliveries as f64)),
            retries_suppressed: self.retries_suppressed.clone(),
            file_ack_percent: adoption(&self.file_acks),
            mcp_ack_percent: adoption(&self.mcp_acks),
            learned: learned.map(|learned| LearnedReport {
                echo_reliable: learned.is_echo_reliable(),
                echo_window_ms: clock::millis(learned.echo_window()),
            }),
            recommendations: self.recommendations(deliveries, learned),
        }
    }

    fn latency(&self, percentile: usize) -> Option<u64> {
        let mut sorted: Vec<u64> = self.latencies_ms.iter().copied().collect();
        sorted.sort_unstable();
        // The nearest rank. Without a sample the index 0 finds nothing.
        let index = (sorted.len() * percentile).div_ceil(100).saturating_sub(1);
        sorted.get(index).copied()
    }

    fn recommendations(&self, deliveries: u64, learned: Option<&Learned>) -> Vec<String> {
        let mut texts = Vec::new();
        if deliveries < EVIDENCE {
            return texts;
        }
        if let Some(percent) = adoption(&self.file_acks).filter(|percent| *percent > ADOPTED) {
            texts.push(format!("file acks {percent} %: echo window {} s", Duration::as_secs(&SHORT_ECHO_WINDOW)));
        }
        if learned.is_some_and(|learned| !learned.is_echo_reliable()) {
            texts.push("no echo: not required, nothing is typed again".to_owned());
        }
        if let Some(percent) = share(self.unverified, deliveries).filter(|percent| *percent > MANY_UNVERIFIED) {
            texts.push(format!("unverified {percent} %: give the program an entry in the harness table, or MCP"));
        }
        texts
    }
}

fn push<T>(sample: &mut VecDeque<T>, value: T) {
    sample.push_back(value);
    if sample.len() > SAMPLE {
        sample.pop_front();
    }
}

fn share(count: u64, total: u64) -> Option<f64> {
    (total > 0).then(|| rounded(count as f64 * 100.0 / total as f64))
}

fn adoption(sample: &VecDeque<bool>) -> Option<f64> {
    share(sample.iter().filter(|acked| **acked).count() as u64, sample.len() as u64)
}

fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shares_times_and_recommendations_are_taken_of_all_outcomes() {
        let mut figures = VerificationFigures::default();
        assert_eq!(figures.report(None).verified_percent, None);
        for latency_ms in 1..=15 {
            figures.on_outcome(Outcome::Verified { method: "echo", latency_ms }, 1);
            figures.on_record(DeliveryRecord { has_file_ack: true, ..DeliveryRecord::default() });
        }
        (0..4).for_each(|_| figures.on_outcome(Outcome::Unverified, 1));
        figures.on_outcome(Outcome::Failed, 4);
        figures.on_suppressed("not_at_prompt");
        let report = serde_json::to_value(figures.report(Some(&Learned::new()))).expect("JSON");
        assert_eq!(report["deliveries"], 20);
        assert_eq!((&report["verified_percent"], &report["failed_percent"]), (&json!(75.0), &json!(5.0)));
        assert_eq!(report["verify_ms"], json!({ "p50": 8, "p95": 15 }));
        assert_eq!(report["attempts_per_delivery"], 1.2);
        assert_eq!(report["retries_suppressed"], json!({ "not_at_prompt": 1 }));
        assert_eq!(report["recommendations"], json!(["file acks 100 %: echo window 5 s"]));
    }
}
