//! Inbox of one connection: decodes, checks the order, counts, and acks by its policy.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::collector::Collector;
use crate::payload::sent_at;

/// Ack policy of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acks {
    /// One ack per frame, like SDK clients.
    Each,
    /// The highest seq of each agent once no frame is waiting, as brokers may do.
    Cumulative,
    /// No acks.
    Withheld,
}

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    agent: Option<Cow<'a, str>>,
    seq: Option<u64>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
}

/// Highest seq by agent name, over all connections of a node.
pub(crate) type Received = Arc<Mutex<HashMap<String, u64>>>;

/// Inbox of one connection.
pub(crate) struct Inbox {
    collector: Arc<Collector>,
    /// Highest seq by agent name, on this connection.
    seqs: HashMap<String, u64>,
    /// Highest seqs of the node over all connections, if it reconnects.
    received: Option<Received>,
    acks: Acks,
    goal: Option<u64>,
    pub(crate) unacked: HashMap<String, u64>,
    pending_replies: Vec<String>,
}

impl Inbox {
    /// Creates the inbox of a new connection.
    pub(crate) fn new(collector: Arc<Collector>, acks: Acks, goal: Option<u64>) -> Self {
        let (seqs, unacked, received) = Default::default();
        Self { collector, seqs, received, acks, goal, unacked, pending_replies: Vec::new() }
    }

    /// Counts frames that earlier connections of the node received as repeated.
    pub(crate) fn remembering(self, received: Option<Received>) -> Self {
        Self { received, ..self }
    }

    /// Returns whether the request `id` was answered.
    pub(crate) fn has_reply(&self, id: &str) -> bool {
        self.pending_replies.iter().any(|reply| reply == id)
    }

    /// Handles a frame; returns an ack to send at once.
    pub(crate) fn frame(&mut self, text: &str) -> Result<Option<String>> {
        let frame: Frame<'_> = serde_json::from_str(text).with_context(|| format!("unreadable frame {text}"))?;
        match &*frame.kind {
            "deliver" => {
                let agent = frame.agent.as_deref().context("deliver without an agent")?;
                let seq = frame.seq.context("deliver without a seq")?;
                let payload = frame.payload.context("deliver without a payload")?.get();
                Ok(self.deliver(agent, seq, payload))
            }
            "reply" => {
                self.pending_replies.extend(frame.id.map(Cow::into_owned));
                Ok(None)
            }
            "error" => bail!("the gateway answered {text}"),
            _ => Ok(None),
        }
    }

    fn deliver(&mut self, agent: &str, seq: u64, payload: &str) -> Option<String> {
        if seq == 0 {
            return None;
        }
        let last = match self.seqs.get_mut(agent) {
            Some(last) => last,
            None => self.seqs.entry(agent.to_owned()).or_insert(seq - 1),
        };
        let before = *last;
        if seq <= before {
            self.collector.duplicate();
            return None;
        }
        *last = seq;
        if seq != before + 1 {
            self.collector.out_of_order(|| format!("{agent} got seq {seq} after {before}"));
        }
        if self.is_new(agent, seq) {
            self.collector.delivered(sent_at(payload));
        }
        if self.goal.is_some_and(|goal| before < goal && goal <= seq) {
            self.collector.caught_up();
        }
        match self.acks {
            Acks::Each => Some(ack_frame(agent, seq)),
            Acks::Withheld => None,
            Acks::Cumulative => {
                match self.unacked.get_mut(agent) {
                    Some(up_to) => *up_to = seq,
                    None => _ = self.unacked.insert(agent.to_owned(), seq),
                }
                None
            }
        }
    }
}

impl Inbox {
    /// Returns whether no earlier connection of the node has received it.
    fn is_new(&self, agent: &str, seq: u64) -> bool {
        let Some(received) = &self.received else { return true };
        let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
        let last = received.entry(agent.to_owned()).or_insert(seq - 1);
        if seq <= *last {
            self.collector.repeated();
            return false;
        }
        if seq != *last + 1 {
            let before = *last;
            self.collector.out_of_order(|| format!("{agent} got seq {seq}, having {before} from all its connections"));
        }
        *last = seq;
        true
    }
}

pub(crate) fn ack_frame(agent: &str, seq: u64) -> String {
    // The agents' names need no escaping.
    format!(r#"{{"v":1,"type":"delivery.ack","agent":"{agent}","up_to_seq":{seq}}}"#)
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    fn inbox(acks: Acks, goal: Option<u64>) -> Inbox {
        Inbox::new(Arc::default(), acks, goal)
    }

    pub(crate) fn deliver(agent: &str, seq: u64) -> String {
        json!({"v": 1, "type": "deliver", "delivery_id": "del_1_2", "agent_id": "2", "agent": agent, "msg_id": "1", "seq": seq,
            "mode": "wait", "payload": {"type": "dm.received", "data": {"text": "lt1:1 \"quoted\""}}})
        .to_string()
    }

    #[test]
    fn a_direct_node_acks_each_frame_once() {
        let mut inbox = inbox(Acks::Each, Some(5));
        let ack = inbox.frame(&deliver("ada", 4)).unwrap();
        assert_eq!(ack.as_deref(), Some(r#"{"v":1,"type":"delivery.ack","agent":"ada","up_to_seq":4}"#));
        assert_eq!(inbox.frame(&deliver("ada", 4)).unwrap(), None);
        assert_eq!(inbox.collector.caught_up_count(), 0);
        assert!(inbox.frame(&deliver("ada", 5)).unwrap().is_some());
        assert_eq!(inbox.collector.caught_up_count(), 1);
        assert_eq!(inbox.collector.delivered_count(), 2);
        assert_eq!(inbox.collector.problems(), ["1 duplicate frames"]);
        assert_eq!(inbox.collector.take_samples().len(), 2);
    }

    #[test]
    fn the_next_connection_may_repeat_but_not_skip() {
        let received = Received::default();
        let mut first = inbox(Acks::Each, None).remembering(Some(Arc::clone(&received)));
        for seq in [1, 2, 3] {
            first.frame(&deliver("ada", seq)).unwrap();
        }
        let collector = Arc::clone(&first.collector);
        let next = || Inbox::new(Arc::clone(&collector), Acks::Each, None).remembering(Some(Arc::clone(&received)));
        let mut second = next();
        for seq in [3, 4] {
            assert!(second.frame(&deliver("ada", seq)).unwrap().is_some());
        }
        assert_eq!((collector.delivered_count(), collector.repeated_count()), (4, 1));
        assert!(collector.problems().is_empty());
        next().frame(&deliver("ada", 6)).unwrap();
        assert_eq!(collector.problems()[0], "1 frames out of order");
    }

    #[test]
    fn a_broker_acks_the_highest_of_each_agent() {
        let mut inbox = inbox(Acks::Cumulative, None);
        for (agent, seq) in [("ada", 1), ("bob", 1), ("ada", 2), ("bob", 3)] {
            assert_eq!(inbox.frame(&deliver(agent, seq)).unwrap(), None);
        }
        assert_eq!(inbox.unacked, HashMap::from([("ada".into(), 2), ("bob".into(), 3)]));
        assert_eq!(inbox.collector.problems(), ["1 frames out of order", "first: bob got seq 3 after 1"]);
    }

    #[test]
    fn replies_are_kept_errors_are_fatal_and_others_ignored() {
        let mut inbox = inbox(Acks::Each, None);
        inbox.frame(r#"{"v":1,"id":"register","type":"reply","ok":true,"data":null}"#).unwrap();
        assert_eq!(inbox.pending_replies, ["register"]);
        let update = r#"{"v":1,"type":"context.update","topic":"agent","event":"delivery.accepted","data":{}}"#;
        assert_eq!(inbox.frame(update).unwrap(), None);
        assert!(inbox.frame(r#"{"v":1,"id":"x","type":"error","ok":false,"code":"c","message":"m"}"#).is_err());
        assert!(inbox.frame("{").is_err());
    }
}
