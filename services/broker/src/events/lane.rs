//! The lane of one subscriber for ephemeral events: bounded, the oldest output is dropped and reported.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use crate::metric_names;
use serde_json::json;
use tokio::sync::Notify;

/// Maximum bytes of output that wait for one subscriber.
const MAX_BYTES: usize = 4 << 20;

/// Ephemeral events that wait for one subscriber.
#[derive(Debug, Default)]
pub(super) struct Lane {
    content: Mutex<Content>,
    pub(super) arrived: Notify,
}

#[derive(Debug, Default)]
struct Content {
    waiting: VecDeque<WaitingEvent>,
    bytes: usize,
    /// Bytes of output that were dropped, by agent, and not reported yet.
    dropped: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct WaitingEvent {
    /// `seq` of the durable event before it.
    after: u64,
    agent: Arc<str>,
    text: Arc<str>,
    output_bytes: usize,
}

impl Lane {
    /// Adds an event behind the durable one `after`, with the number of bytes of an agent's output in it.
    pub(super) fn push(&self, after: u64, agent: &Arc<str>, text: &Arc<str>, output_bytes: usize) {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        content.bytes += text.len();
        content.waiting.push_back(WaitingEvent { after, agent: agent.clone(), text: text.clone(), output_bytes });
        while content.bytes > MAX_BYTES {
            let Some(oldest) = content.waiting.pop_front() else { break };
            content.bytes -= oldest.text.len();
            *content.dropped.entry(oldest.agent.to_string()).or_default() += oldest.output_bytes;
            metrics::counter!(metric_names::OUTPUT_DROPPED_BYTES).increment(oldest.output_bytes as u64);
        }
        drop(content);
        self.arrived.notify_one();
    }

    /// Bytes of the events that wait.
    pub(super) fn bytes(&self) -> usize {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// `seq` of the durable event before the next event.
    pub(super) fn next_after(&self) -> Option<u64> {
        let content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        // 0: the report of dropped output goes out before any other event.
        if content.dropped.is_empty() { content.waiting.front().map(|next| next.after) } else { Some(0) }
    }

    /// Takes the next event, reports of dropped output first.
    pub(super) fn pop(&self, now_ms: i64) -> Option<Arc<str>> {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((name, bytes)) = content.dropped.pop_first() {
            let report = json!({ "kind": "worker_stream_dropped", "name": name, "bytes": bytes, "timestamp": now_ms });
            return Some(report.to_string().into());
        }
        let next = content.waiting.pop_front()?;
        content.bytes -= next.text.len();
        Some(next.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_drops_the_oldest_and_says_so() {
        let lane = Lane::default();
        let (ada, text): (Arc<str>, Arc<str>) = ("ada".into(), "x".repeat(MAX_BYTES / 2).into());
        for _ in 0..3 {
            lane.push(0, &ada, &text, 10);
        }
        let report = lane.pop(5).expect("a report");
        assert_eq!(&*report, r#"{"kind":"worker_stream_dropped","name":"ada","bytes":10,"timestamp":5}"#);
        assert!(lane.pop(5).is_some() && lane.pop(5).is_some() && lane.pop(5).is_none());
    }
}
