//! [`Mailbox`]: the order of one agent's messages, duplicates, and the cumulative ack. Pure: frames go in, verdicts
//! come out.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    time::Duration,
};

use relay_verification::ack_floor::AckFloor;
use relay_wire::nodes::engine_frame::Deliver;
use serde_json::Value;

use super::{FrameMeaning, Message, classify, classify::relayed_author, known_ids::KnownIds};

/// Maximum number of frames kept that came before their predecessors.
const MAX_EARLY: usize = 64;
/// Maximum size of these frames.
const MAX_EARLY_BYTES: usize = 4 << 20;
/// Largest position: the engine stores them as signed numbers of 64 bits.
const MAX_POSITION: u64 = i64::MAX.cast_unsigned();
/// Maximum number of messages that wait for one agent, and of their bytes.
// Above 1000, the unsettled deliveries that the engine keeps for a mailbox by default.
const MAX_QUEUED: usize = 1024;
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// Order of one agent's messages.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    agent_id: String,
    /// Agent of the broker itself, whose messages carry the name of the real sender.
    own_agent_id: String,
    floor: AckFloor,
    known: KnownIds,
    /// Messages that the agent's session has from an earlier process of the broker.
    had: HashSet<String>,
    early: BTreeMap<u64, Deliver>,
    early_bytes: usize,
    /// Messages above the acked position with the instants at which they were taken.
    taken: VecDeque<(u64, i64)>,
    queued_count: usize,
    queued_bytes: usize,
    /// Newest frame of this connection, also if it was dropped because the queue was full.
    newest: u64,
    /// The engine has frames that found no room.
    is_refused: bool,
}

/// Entries of a mailbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MailboxLength {
    /// Messages that wait to be typed.
    pub(crate) messages: usize,
    pub(crate) bytes: usize,
    /// Frames before their predecessors.
    pub(crate) early: usize,
}

/// Consequence of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Messages to queue, in this order. The ack follows with them, unless `acked` has moved already.
    Taken { messages: Vec<Message>, acked: Option<u64> },
    /// Nothing new: the position is acknowledged again.
    Repeated { acked: u64 },
    /// Dropped because the queue was full: a frame outside of the order is not repeated.
    Dropped { acked: u64 },
    /// Nothing is acknowledged: a predecessor is missing.
    Early,
    /// Nothing is acknowledged: the queue is full.
    Full,
    /// Nothing is acknowledged: the frame is for another agent of this name.
    OtherAgent,
}

impl Mailbox {
    /// Continues behind the engine's cursor, with the ids of messages that the agent's session has already.
    pub(crate) fn new(agent_id: &str, own_agent_id: &str, cursor: u64, had: impl IntoIterator<Item = String>) -> Self {
        Self {
            agent_id: agent_id.to_owned(),
            own_agent_id: own_agent_id.to_owned(),
            floor: AckFloor::new(cursor.min(MAX_POSITION)),
            known: KnownIds::default(),
            had: had.into_iter().collect(),
            early: BTreeMap::new(),
            early_bytes: 0,
            taken: VecDeque::new(),
            queued_count: 0,
            queued_bytes: 0,
            newest: 0,
            is_refused: false,
        }
    }

    /// The position that may be acknowledged.
    pub(crate) fn acked(&self) -> u64 {
        self.floor.acked()
    }

    /// Its entries now.
    pub(crate) fn length(&self) -> MailboxLength {
        MailboxLength { messages: self.queued_count, bytes: self.queued_bytes, early: self.early.len() }
    }

    /// Takes a frame that came at `now_ms`.
    pub(crate) fn on_frame(&mut self, frame: Deliver, now_ms: i64) -> Verdict {
        // An agent that was deleted and registered again has the same name and other positions.
        if frame.agent_id != self.agent_id {
            return Verdict::OtherAgent;
        }
        if frame.seq == 0 {
            return self.take_outside(frame, now_ms);
        }
        let next = self.floor.received() + 1;
        if frame.seq < next {
            return Verdict::Repeated { acked: self.acked() };
        }
        if frame.seq > next {
            if self.is_refused {
                // Its predecessor is not missing: there was no room, and both are repeated once there is.
                return Verdict::Full;
            }
            // Also of a frame that is not kept: the gap stays until it was repeated.
            self.newest = self.newest.max(frame.seq);
            self.keep_early(frame);
            return Verdict::Early;
        }
        self.take_in_order(frame, now_ms)
    }

    fn keep_early(&mut self, frame: Deliver) {
        let bytes = self.early_bytes + content_len(&frame);
        if self.early.len() < MAX_EARLY && bytes <= MAX_EARLY_BYTES && !self.early.contains_key(&frame.seq) {
            self.early_bytes = bytes;
            self.early.insert(frame.seq, frame);
        }
    }

    /// Forgets the early frames up to the last one received, and all of them if the queue is full.
    fn forget_early(&mut self) {
        self.early = self.early.split_off(&(self.floor.received() + 1));
        if self.is_refused {
            // After a refusal the engine repeats them after the refused one.
            self.early.clear();
        }
        self.early_bytes = self.early.values().map(content_len).sum();
    }

    fn take_outside(&mut self, frame: Deliver, now_ms: i64) -> Verdict {
        let acked = Some(self.acked());
        if self.known.contains(&frame.msg_id) {
            return Verdict::Repeated { acked: self.acked() };
        }
        if !self.has_room(&frame) {
            return Verdict::Dropped { acked: self.acked() };
        }
        // Only now: one that found no room may come again.
        self.known.insert(&frame.msg_id);
        match self.read(frame, now_ms) {
            FrameMeaning::Typed(message) => {
                self.queue(&message);
                Verdict::Taken { messages: vec![*message], acked }
            }
            FrameMeaning::Silent { .. } => Verdict::Repeated { acked: self.acked() },
        }
    }

    fn take_in_order(&mut self, frame: Deliver, now_ms: i64) -> Verdict {
        let mut messages = Vec::new();
        let mut acked = None;
        let mut next = Some(frame);
        while let Some(frame) = next {
            if !self.has_room(&frame) {
                self.is_refused = true;
                break;
            }
            let seq = frame.seq;
            // It is the next one, or the loop has reached it.
            if !self.floor.receive(seq) {
                break;
            }
            // Both are noted before they are looked at: a message may be repeated under another seq.
            let is_had = self.had.remove(&frame.msg_id);
            let is_new = self.known.insert(&frame.msg_id);
            match self.read(frame, now_ms) {
                FrameMeaning::Typed(message) if is_new && !is_had => {
                    self.queue(&message);
                    self.taken.push_back((seq, now_ms));
                    messages.push(*message);
                }
                // Nothing to see, or seen under this id before.
                FrameMeaning::Typed(_) | FrameMeaning::Silent { .. } => acked = self.floor.settle(seq).or(acked),
            }
            next = self.early.remove(&(seq + 1));
        }
        self.forget_early();
        if messages.is_empty() && acked.is_none() && self.is_refused {
            return Verdict::Full;
        }
        Verdict::Taken { messages, acked }
    }

    fn read(&self, frame: Deliver, now_ms: i64) -> FrameMeaning {
        let relayed = relayed_author(&frame.payload.data).map(str::to_owned);
        let mut classified = classify(frame, now_ms);
        if let (FrameMeaning::Typed(message), Some(relayed)) = (&mut classified, relayed)
            // Only in messages of the broker's own agent: the sender chooses the metadata, and could name any other
            // author in it.
            && message.author.agent_id.as_deref() == Some(self.own_agent_id.as_str())
        {
            message.author.name = relayed;
        }
        classified
    }

    fn has_room(&self, frame: &Deliver) -> bool {
        self.queued_count < MAX_QUEUED && self.queued_bytes + content_len(frame) <= MAX_QUEUED_BYTES
    }

    fn queue(&mut self, message: &Message) {
        self.queued_count += 1;
        self.queued_bytes += message.len();
    }

    /// A typed message is queued again: its program has ended.
    pub(crate) fn on_requeued(&mut self, message: &Message) {
        self.queue(message);
    }

    /// A queued message was typed, or is not going to be. Returns `true` if frames that were refused can now be taken.
    pub(crate) fn on_typed(&mut self, message: &Message) -> bool {
        self.queued_count = self.queued_count.saturating_sub(1);
        self.queued_bytes = self.queued_bytes.saturating_sub(message.len());
        // Not at the first free place: the connection is renewed for it, which repeats everything above the acks.
        self.is_refused && self.queued_count <= MAX_QUEUED / 2 && self.queued_bytes <= MAX_QUEUED_BYTES / 2
    }

    /// Settles a message. Returns the position to acknowledge, if it rises.
    pub(crate) fn settle(&mut self, seq: u64) -> Option<u64> {
        self.floor.settle(seq)
    }

    /// Times that messages waited from being taken to being acknowledged, for those that are since the last call.
    pub(crate) fn take_ack_waits(&mut self, now_ms: i64) -> Vec<Duration> {
        let acked = self.acked();
        let count = self.taken.partition_point(|(seq, _)| *seq <= acked);
        // The machine's clock may have been set back in between.
        let waited = |(_, taken_ms): (u64, i64)| Duration::from_millis(u64::try_from(now_ms - taken_ms).unwrap_or(0));
        self.taken.drain(..count).map(waited).collect()
    }

    /// The engine is going to send everything behind the acked position again.
    pub(crate) fn on_reconnected(&mut self) {
        self.early.clear();
        self.early_bytes = 0;
        self.newest = 0;
        self.is_refused = false;
    }

    /// Returns `true` while a frame up to the newest one is missing. Frames that found no room are repeated once there
    /// is.
    pub(crate) fn has_gap(&self) -> bool {
        !self.is_refused && self.newest > self.floor.received()
    }
}

/// Bytes that a frame takes here: its texts, and each value's own size, since a list of nothing takes memory as well.
fn content_len(frame: &Deliver) -> usize {
    fn len(value: &Value) -> usize {
        let content = match value {
            Value::String(text) => text.len(),
            Value::Array(values) => values.iter().map(len).sum(),
            Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + len(value)).sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        };
        size_of::<Value>() + content
    }
    let content: usize = frame.payload.data.iter().map(|(key, value)| key.len() + len(value)).sum();
    frame.delivery_id.len() + frame.msg_id.len() + content
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use relay_wire::nodes::engine_frame::{self, EngineFrame};
    use serde_json::json;

    use super::*;
    use crate::edits::{edited, settings};

    fn frame(seq: u64, msg_id: &str, kind: &str) -> Deliver {
        let frame = json!({
            "delivery_id": format!("del_{msg_id}"), "agent_id": "7", "agent": "ada", "msg_id": msg_id, "seq": seq,
            "mode": "wait", "payload": { "type": kind, "data": { "text": msg_id, "agent_id": "1",
            "metadata": { "relay_from": "outside" } } },
        });
        serde_json::from_value(frame).expect("a frame")
    }

    fn take(mailbox: &mut Mailbox, seq: u64, msg_id: &str) -> Verdict {
        mailbox.on_frame(frame(seq, msg_id, "message.created"), 0)
    }

    fn bodies(verdict: &Verdict) -> Vec<&str> {
        match verdict {
            Verdict::Taken { messages, .. } => messages.iter().map(|message| message.body.as_str()).collect(),
            Verdict::Repeated { .. }
            | Verdict::Dropped { .. }
            | Verdict::Early
            | Verdict::Full
            | Verdict::OtherAgent => Vec::new(),
        }
    }

    #[test]
    fn messages_are_taken_in_order_and_once() {
        let mut mailbox = Mailbox::new("7", "1", 4, []);
        assert_eq!(take(&mut mailbox, 7, "c"), Verdict::Early);
        assert_eq!(take(&mut mailbox, 6, "b"), Verdict::Early);
        assert!(mailbox.has_gap());
        let taken = take(&mut mailbox, 5, "a");
        assert_eq!(bodies(&taken), ["a", "b", "c"]);
        assert!(!mailbox.has_gap());
        assert_eq!(take(&mut mailbox, 6, "b"), Verdict::Repeated { acked: 4 });
        assert_eq!((mailbox.settle(6), mailbox.settle(5)), (None, Some(6)));
        // The same message under another number.
        assert_eq!(take(&mut mailbox, 8, "a"), Verdict::Taken { messages: vec![], acked: None });
        assert_eq!(mailbox.settle(7), Some(8));
        let Verdict::Taken { messages, .. } = taken else { panic!("taken") };
        assert_eq!(messages[0].author.name, "outside");
    }

    #[test]
    fn frames_beyond_the_early_ones_are_missing_until_they_are_repeated() {
        let mut mailbox = Mailbox::new("7", "1", 0, []);
        let last = MAX_EARLY as u64 + 3;
        for seq in 2..=last {
            assert_eq!(take(&mut mailbox, seq, &seq.to_string()), Verdict::Early);
        }
        assert_eq!(bodies(&take(&mut mailbox, 1, "1")).len(), MAX_EARLY + 1);
        assert!(mailbox.has_gap(), "two have been dropped");
        for seq in [last - 1, last] {
            assert_eq!(bodies(&take(&mut mailbox, seq, &seq.to_string())).len(), 1);
        }
        assert!(!mailbox.has_gap());
        assert_eq!(take(&mut mailbox, last + 2, "next"), Verdict::Early);
        mailbox.on_reconnected();
        assert!(!mailbox.has_gap(), "all of them come again");
    }

    #[test]
    fn early_frames_have_a_bound_of_bytes() {
        let mut mailbox = Mailbox::new("7", "1", 0, []);
        let texts = json!([{ "content": "x".repeat(MAX_EARLY_BYTES / 4) }]);
        let nothing = json!(vec![json!([]); MAX_EARLY_BYTES / 4 / size_of::<Value>()]);
        for (seq, large) in (2..=6).zip([&texts, &nothing].into_iter().cycle()) {
            let mut early = frame(seq, "large", "message.created");
            early.payload.data.insert("blocks".to_owned(), large.clone());
            assert_eq!(mailbox.on_frame(early, 0), Verdict::Early);
        }
        assert!(mailbox.early.len() < 4 && mailbox.early_bytes <= MAX_EARLY_BYTES, "{}", mailbox.early_bytes);
        assert_eq!(bodies(&take(&mut mailbox, 1, "1")).len(), 2, "the others have the id of the second");
        assert_eq!((mailbox.early_bytes, mailbox.has_gap()), (0, true));
    }

    #[test]
    fn a_cursor_beyond_every_position_is_the_largest_position() {
        let mut mailbox = Mailbox::new("7", "1", u64::MAX, []);
        assert_eq!(take(&mut mailbox, 1, "a"), Verdict::Repeated { acked: MAX_POSITION });
        assert_eq!(bodies(&take(&mut mailbox, MAX_POSITION + 1, "b")), ["b"]);
        assert_eq!(take(&mut mailbox, u64::MAX, "c"), Verdict::Early);
    }

    #[test]
    fn frames_without_text_are_settled_in_their_turn() {
        let mut mailbox = Mailbox::new("7", "1", 0, ["had".to_owned()]);
        assert_eq!(bodies(&take(&mut mailbox, 1, "a")), ["a"]);
        let tombstone = mailbox.on_frame(frame(2, "tomb", "delivery.expired"), 0);
        assert_eq!(tombstone, Verdict::Taken { messages: vec![], acked: None });
        assert_eq!(mailbox.settle(1), Some(2));
        let had = take(&mut mailbox, 3, "had");
        assert_eq!(had, Verdict::Taken { messages: vec![], acked: Some(3) });
    }

    #[test]
    fn frames_outside_of_the_order_move_no_position() {
        let mut mailbox = Mailbox::new("7", "1", 3, []);
        let outcome = mailbox.on_frame(frame(0, "evt-1", "action.completed"), 0);
        assert!(matches!(outcome, Verdict::Taken { acked: Some(3), .. }));
        let again = mailbox.on_frame(frame(0, "evt-1", "action.completed"), 0);
        assert_eq!(again, Verdict::Repeated { acked: 3 });
        let other = Deliver { agent_id: "8".into(), ..frame(4, "x", "message.created") };
        assert_eq!(mailbox.on_frame(other, 0), Verdict::OtherAgent);
    }

    #[test]
    fn a_full_queue_refuses_the_newest_until_there_is_room() {
        let mut mailbox = Mailbox::new("7", "1", 0, []);
        let mut taken = Vec::new();
        for seq in 1..=MAX_QUEUED as u64 {
            let Verdict::Taken { messages, .. } = take(&mut mailbox, seq, &seq.to_string()) else { panic!("{seq}") };
            taken.extend(messages);
        }
        let next = MAX_QUEUED as u64 + 1;
        assert_eq!(take(&mut mailbox, next, "next"), Verdict::Full);
        assert_eq!(take(&mut mailbox, next + 1, "behind it"), Verdict::Full);
        assert!(!mailbox.has_gap(), "no frame is missing");
        let outcome = mailbox.on_frame(frame(0, "evt-9", "action.completed"), 0);
        assert_eq!(outcome, Verdict::Dropped { acked: 0 });
        let room = taken.iter().position(|message| mailbox.on_typed(message));
        assert_eq!(room, Some(MAX_QUEUED / 2 - 1));
        mailbox.on_reconnected();
        assert_eq!(bodies(&take(&mut mailbox, next, "next")), ["next"]);
    }

    /// Frames as engines send them.
    const RECORDED: [&[u8]; 4] = [
        br#"{"v":1,"type":"deliver","delivery_id":"d1","agent_id":"7","agent":"ada","msg_id":"m1","seq":1,"mode":"wait","payload":{"type":"message.created","data":{"text":"one","agent_name":"bob","channel_name":"general"}}}"#,
        br#"{"v":1,"type":"deliver","delivery_id":"d2","agent_id":"7","agent":"ada","msg_id":"m2","seq":2,"mode":"steer","payload":{"type":"dm.received","data":{"text":"two","from_name":"bob","priority":4,"metadata":{"relay_from":"x"}}}}"#,
        br#"{"v":1,"type":"deliver","delivery_id":"d3","agent_id":"7","agent":"ada","msg_id":"m3","seq":3,"mode":"wait","payload":{"type":"delivery.expired","data":{}}}"#,
        br#"{"v":1,"type":"deliver","delivery_id":"d0","agent_id":"7","agent":"ada","msg_id":"m0","seq":0,"mode":"wait","payload":{"type":"action.completed","data":{"output":{"a":[1]}}}}"#,
    ];

    proptest! {
        #![proptest_config(settings())]

        /// Fuzz target of engine frames: order, acks and bounds hold whatever comes.
        #[test]
        fn edited_frames_keep_the_order(
            frames in prop::collection::vec(edited(&RECORDED, &[b"\"seq\":2", b"18446744073709551615", b"null", b"{"]), 1..12)
        ) {
            let mut mailbox = Mailbox::new("7", "1", 0, []);
            let (mut last, mut acked) = (0, 0);
            for bytes in RECORDED.iter().map(|seed| seed.to_vec()).chain(frames) {
                let text = String::from_utf8_lossy(&bytes);
                // Edits join frames; the parts between them may be whole.
                for part in text.split_inclusive("}}}") {
                    let Ok(EngineFrame::Deliver(frame)) = engine_frame::decode(part) else { continue };
                    if let Verdict::Taken { messages, .. } = mailbox.on_frame(*frame, 0) {
                        for seq in messages.iter().filter_map(|message| message.seq) {
                            prop_assert!(seq > last, "{} follows {}", seq, last);
                            last = seq;
                        }
                    }
                    prop_assert!(mailbox.acked() >= acked, "the ack falls");
                    acked = mailbox.acked();
                    prop_assert!(mailbox.early.len() <= MAX_EARLY);
                }
            }
            prop_assert_eq!(acked, 0, "the first message is unsettled");
        }
    }
}
