//! Percentiles over all samples: a run has at most a few million of four bytes each.

use serde::Serialize;

/// Summary of latencies, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Latency {
    /// Median of the samples.
    pub(crate) p50_ms: f64,
    /// 99th percentile of the samples.
    pub(crate) p99_ms: f64,
    /// Maximum of the samples.
    pub(crate) max_ms: f64,
}

impl Latency {
    /// Summarises samples in microseconds, in any order; `None` without samples.
    pub(crate) fn from_micros(mut micros: Vec<u32>) -> Option<Self> {
        micros.sort_unstable();
        let at = |percent| percentile(&micros, percent).map(|value| f64::from(value) / 1000.0);
        Some(Self { p50_ms: at(50.0)?, p99_ms: at(99.0)?, max_ms: at(100.0)? })
    }
}

/// Returns the smallest sample with at least `percent` % of all samples at or below it (nearest rank).
pub(crate) fn percentile(sorted: &[u32], percent: f64) -> Option<u32> {
    #[expect(clippy::cast_possible_truncation, reason = "a rank among the samples")]
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_the_nearest_rank() {
        let hundred: Vec<u32> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 50.0), Some(50));
        assert_eq!(percentile(&hundred, 99.0), Some(99));
        assert_eq!(percentile(&hundred, 100.0), Some(100));
        assert_eq!(percentile(&hundred, 0.0), Some(1));
        assert_eq!(percentile(&[7], 99.0), Some(7));
        assert_eq!(percentile(&[1, 2, 3], 50.0), Some(2));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn latencies_are_sorted_and_shown_in_milliseconds() {
        let latency = Latency::from_micros(vec![3000, 1000, 2000]).unwrap();
        assert_eq!(latency, Latency { p50_ms: 2.0, p99_ms: 3.0, max_ms: 3.0 });
        assert_eq!(Latency::from_micros(Vec::new()), None);
    }
}
