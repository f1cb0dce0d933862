//! Ledger of everything that the nodes receive, verified frame by frame.

use std::{
    collections::{BTreeMap, HashMap, btree_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use relay_testkit::history::{Content, History};
use serde_json::Value;

/// Frame received by an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub delivery_id: String,
    pub msg_id: String,
    /// Text of the message; `None` for a tombstone.
    pub text: Option<String>,
}

/// Returns what a `deliver` frame contains.
pub fn content_of(frame: &Value) -> Content {
    let payload = &frame["payload"];
    let text = (payload["type"] != "delivery.expired")
        .then(|| payload["data"]["text"].as_str().unwrap_or_default().to_owned());
    Content { delivery_id: frame["delivery_id"].as_str().unwrap_or_default().to_owned(), text }
}

#[derive(Debug, Default)]
struct Mailbox {
    frames: BTreeMap<u64, Received>,
    /// Highest seq received without a gap over all connections, as a broker stores it.
    position: u64,
    /// Highest floor read over REST before a fault.
    settled: u64,
    repeats: u64,
    position_at: Option<Instant>,
}

/// History of a node's connections.
#[derive(Clone, Debug, Default)]
pub struct Links {
    /// Number of registrations.
    pub registered: u32,
    /// Close codes of ended connections.
    pub ended: Vec<Option<u16>>,
    /// `true` while the node is registered.
    pub up: bool,
    /// Time of the last change.
    pub changed_at: Option<Instant>,
    /// Error of the last refused connection.
    pub refusal: Option<String>,
}

#[derive(Debug, Default)]
struct Inner {
    mailboxes: HashMap<String, Mailbox>,
    nodes: HashMap<String, Links>,
    notices: Vec<Value>,
    violations: Vec<String>,
}

/// Ledger shared by all nodes of a test.
#[derive(Debug, Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
    /// Frames, acks and posts for the rules that all fault tests share.
    history: Arc<History>,
}

/// Last seq of each agent on one connection.
#[derive(Debug, Default)]
pub struct ConnectionLedger {
    last: HashMap<String, u64>,
}

impl Ledger {
    /// Creates a ledger with positions of its own, for a process without the state of the others, and the same history.
    pub fn with_history_of(other: &Self) -> Self {
        Self { history: Arc::clone(&other.history), ..Self::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the history of posts, frames and acks.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Records a `deliver` frame with a seq above 0 and returns the agent's position. Verifies that frames arrive
    /// without gap or reorder on their connection, and that nothing below a readable floor is repeated; the history
    /// judges the contents.
    pub fn record_delivery(&self, agent: &str, frame: &Value, line: &mut ConnectionLedger) -> u64 {
        let (seq, content) = (frame["seq"].as_u64().unwrap_or_default(), content_of(frame));
        self.history.record_frame(agent, seq, content.clone());
        let Content { delivery_id, text } = content;
        let msg_id = frame["msg_id"].as_str().unwrap_or_default().to_owned();
        let received = Received { delivery_id, msg_id, text };
        let mut inner = self.inner();
        let mailbox = inner.mailboxes.entry(agent.to_owned()).or_default();
        let mut wrong = None;
        match line.last.insert(agent.to_owned(), seq) {
            Some(last) if seq != last + 1 => {
                wrong = Some(format!("{agent}: seq {seq} after {last} on one connection"));
            }
            None if seq > mailbox.position + 1 => {
                wrong = Some(format!("{agent}: a connection began at {seq}, having {}", mailbox.position));
            }
            _ => {}
        }
        if seq <= mailbox.settled && received.text.is_some() {
            wrong = Some(format!("{agent}: seq {seq} came back though floor {} was readable", mailbox.settled));
        }
        match mailbox.frames.entry(seq) {
            Entry::Occupied(_) => mailbox.repeats += 1,
            Entry::Vacant(free) => drop(free.insert(received)),
        }
        if seq == mailbox.position + 1 {
            mailbox.position = seq;
            mailbox.position_at = Some(Instant::now());
        }
        let position = mailbox.position;
        inner.violations.extend(wrong);
        position
    }

    /// Returns the position that a broker stores for an agent.
    pub fn position(&self, agent: &str) -> u64 {
        self.inner().mailboxes.get(agent).map_or(0, |mailbox| mailbox.position)
    }

    /// Returns the time at which the agent's position last moved.
    pub fn moved_at(&self, agent: &str) -> Option<Instant> {
        self.inner().mailboxes.get(agent).and_then(|mailbox| mailbox.position_at)
    }

    /// Returns the frames of an agent by seq.
    pub fn frames(&self, agent: &str) -> BTreeMap<u64, Received> {
        self.inner().mailboxes.get(agent).map(|mailbox| mailbox.frames.clone()).unwrap_or_default()
    }

    /// Returns the texts of an agent in order.
    pub fn texts(&self, agent: &str) -> Vec<String> {
        self.frames(agent).into_values().filter_map(|frame| frame.text).collect()
    }

    /// Returns the number of repeated frames.
    pub fn repeats(&self) -> u64 {
        self.inner().mailboxes.values().map(|mailbox| mailbox.repeats).sum()
    }

    /// Records a floor that was read over REST: frames at or below it must not be repeated.
    pub fn record_floor(&self, agent: &str, floor: u64) {
        let mut inner = self.inner();
        let mailbox = inner.mailboxes.entry(agent.to_owned()).or_default();
        mailbox.settled = mailbox.settled.max(floor);
    }

    /// Records a registration.
    pub fn record_registration(&self, node: &str) {
        let mut inner = self.inner();
        let links = inner.nodes.entry(node.to_owned()).or_default();
        links.registered += 1;
        links.up = true;
        links.changed_at = Some(Instant::now());
    }

    /// Records a refused connection. A provider conflict is a violation, because the incumbent connection has ended.
    pub fn record_refusal(&self, node: &str, reason: &str) {
        let mut inner = self.inner();
        if reason.contains("provider_instance_conflict") {
            inner.violations.push(format!("{node}: {reason}"));
        }
        inner.nodes.entry(node.to_owned()).or_default().refusal = Some(reason.to_owned());
    }

    /// Records the end of a connection.
    pub fn record_end(&self, node: &str, code: Option<u16>) {
        let mut inner = self.inner();
        let links = inner.nodes.entry(node.to_owned()).or_default();
        links.ended.push(code);
        links.up = false;
        links.changed_at = Some(Instant::now());
    }

    /// Returns the history of a node's connections.
    pub fn links(&self, node: &str) -> Links {
        self.inner().nodes.get(node).cloned().unwrap_or_default()
    }

    /// Returns the unregistered nodes with their last refusal.
    pub fn nodes_down(&self) -> Vec<(String, Option<String>)> {
        let inner = self.inner();
        inner.nodes.iter().filter(|(_, l)| !l.up).map(|(name, l)| (name.clone(), l.refusal.clone())).collect()
    }

    /// Records a `context.update` frame.
    pub fn record_notice(&self, frame: Value) {
        self.inner().notices.push(frame);
    }

    /// Returns the `context.update` frames of an event.
    pub fn notices(&self, event: &str) -> Vec<Value> {
        self.inner().notices.iter().filter(|frame| frame["event"] == event).cloned().collect()
    }

    /// Records any other violation.
    pub fn record_violation(&self, what: String) {
        self.inner().violations.push(what);
    }

    /// Returns the violations that concern connections, not contents.
    pub fn connection_violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    /// Returns all violations so far, except those that need the posts.
    pub fn violations(&self) -> Vec<String> {
        let breaches = self.history.breaches();
        self.inner().violations.iter().cloned().chain(breaches.iter().map(ToString::to_string)).collect()
    }

    /// Panics if there are violations.
    #[track_caller]
    pub fn assert_clean(&self) {
        let violations = self.violations();
        let first: Vec<_> = violations.iter().take(20).collect();
        assert!(violations.is_empty(), "{} violations: {first:#?}", violations.len());
    }
}
