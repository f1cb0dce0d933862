//! What the nodes have seen, judged as it comes in.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use serde_json::Value;

/// A frame that an agent got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its delivery id.
    pub delivery_id: String,
    /// Its message id.
    pub msg_id: String,
    /// The message's text; none for a tombstone.
    pub text: Option<String>,
}

#[derive(Debug, Default)]
struct Mailbox {
    frames: BTreeMap<u64, Received>,
    /// Received without a gap up to here, over all connections: what a broker keeps.
    position: u64,
    /// The floor that was readable over REST before something was killed.
    settled: u64,
    repeats: u64,
    position_at: Option<Instant>,
}

/// A node's connections.
#[derive(Clone, Debug, Default)]
pub struct Links {
    /// How often it registered.
    pub registered: u32,
    /// How its connections ended: the close code, if there was one.
    pub ended: Vec<Option<u16>>,
    /// Whether it is registered now.
    pub up: bool,
    /// When the last change was.
    pub changed_at: Option<Instant>,
    /// Why it was last not let in.
    pub refusal: Option<String>,
}

#[derive(Debug, Default)]
struct Inner {
    mailboxes: HashMap<String, Mailbox>,
    nodes: HashMap<String, Links>,
    notices: Vec<Value>,
    violations: Vec<String>,
}

/// What all nodes have seen.
#[derive(Debug, Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
}

/// What one connection has seen: the last seq of each agent.
#[derive(Debug, Default)]
pub struct Line {
    last: HashMap<String, u64>,
}

impl Ledger {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a `deliver` frame with a seq above 0 and returns the agent's position. Judges that frames
    /// come without gap or reorder on their connection, that repeats carry the same ids, and that nothing
    /// comes back whose floor was readable.
    pub fn received(&self, agent: &str, frame: &Value, line: &mut Line) -> u64 {
        let seq = frame["seq"].as_u64().unwrap_or_default();
        let payload = &frame["payload"];
        let text = (payload["type"] != "delivery.expired")
            .then(|| payload["data"]["text"].as_str().unwrap_or_default().to_owned());
        let id = |field: &str| frame[field].as_str().unwrap_or_default().to_owned();
        let received = Received { delivery_id: id("delivery_id"), msg_id: id("msg_id"), text };
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
        if let Some(known) = mailbox.frames.get(&seq) {
            mailbox.repeats += 1;
            if known.text.is_some() && received.text.is_some() && *known != received {
                wrong = Some(format!("{agent}: seq {seq} was {known:?} and came back as {received:?}"));
            }
        } else {
            mailbox.frames.insert(seq, received);
        }
        if seq == mailbox.position + 1 {
            mailbox.position = seq;
            mailbox.position_at = Some(Instant::now());
        }
        let position = mailbox.position;
        inner.violations.extend(wrong);
        position
    }

    /// The position that a broker keeps for an agent.
    pub fn position(&self, agent: &str) -> u64 {
        self.inner().mailboxes.get(agent).map_or(0, |mailbox| mailbox.position)
    }

    /// When the agent's position last moved.
    pub fn moved_at(&self, agent: &str) -> Option<Instant> {
        self.inner().mailboxes.get(agent).and_then(|mailbox| mailbox.position_at)
    }

    /// What an agent got, by seq.
    pub fn frames(&self, agent: &str) -> BTreeMap<u64, Received> {
        self.inner().mailboxes.get(agent).map(|mailbox| mailbox.frames.clone()).unwrap_or_default()
    }

    /// The texts that an agent got, in order.
    pub fn texts(&self, agent: &str) -> Vec<String> {
        self.frames(agent).into_values().filter_map(|frame| frame.text).collect()
    }

    /// Frames that came more than once.
    pub fn repeats(&self) -> u64 {
        self.inner().mailboxes.values().map(|mailbox| mailbox.repeats).sum()
    }

    /// A floor was read over REST: nothing at or below it may come back.
    pub fn floor_read(&self, agent: &str, floor: u64) {
        let mut inner = self.inner();
        let mailbox = inner.mailboxes.entry(agent.to_owned()).or_default();
        mailbox.settled = mailbox.settled.max(floor);
    }

    /// A node registered.
    pub fn registered(&self, node: &str) {
        let mut inner = self.inner();
        let links = inner.nodes.entry(node.to_owned()).or_default();
        links.registered += 1;
        links.up = true;
        links.changed_at = Some(Instant::now());
    }

    /// A node was not let in. A provider conflict is a violation: the incumbent is a connection that is gone.
    pub fn refused(&self, node: &str, reason: &str) {
        let mut inner = self.inner();
        if reason.contains("provider_instance_conflict") {
            inner.violations.push(format!("{node}: {reason}"));
        }
        inner.nodes.entry(node.to_owned()).or_default().refusal = Some(reason.to_owned());
    }

    /// A node's connection ended.
    pub fn ended(&self, node: &str, code: Option<u16>) {
        let mut inner = self.inner();
        let links = inner.nodes.entry(node.to_owned()).or_default();
        links.ended.push(code);
        links.up = false;
        links.changed_at = Some(Instant::now());
    }

    /// A node's connections so far.
    pub fn links(&self, node: &str) -> Links {
        self.inner().nodes.get(node).cloned().unwrap_or_default()
    }

    /// Nodes that are not registered now, with the last refusal.
    pub fn nodes_down(&self) -> Vec<(String, Option<String>)> {
        let inner = self.inner();
        inner.nodes.iter().filter(|(_, l)| !l.up).map(|(name, l)| (name.clone(), l.refusal.clone())).collect()
    }

    /// A `context.update` came.
    pub fn noticed(&self, frame: Value) {
        self.inner().notices.push(frame);
    }

    /// All `context.update` frames of this event.
    pub fn notices(&self, event: &str) -> Vec<Value> {
        self.inner().notices.iter().filter(|frame| frame["event"] == event).cloned().collect()
    }

    /// Something else that must not happen.
    pub fn violation(&self, what: String) {
        self.inner().violations.push(what);
    }

    /// Everything that must not happen and did.
    pub fn violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    /// Panics if anything happened that must not.
    #[track_caller]
    pub fn assert_clean(&self) {
        let violations = self.violations();
        let first: Vec<_> = violations.iter().take(20).collect();
        assert!(violations.is_empty(), "{} violations: {first:#?}", violations.len());
    }
}
