//! History of what clients did and saw, and the rules that it must keep whatever faults happened meanwhile.
//!
//! Tests record posts with their answers, frames and acks into a [`History`], then the stored, listed and
//! acknowledged deliveries at the end, and [`History::violations`] judges it. The rules know no time and no
//! implementation, so that tests of crashes, outages and failovers share them. The caller says which accepted messages
//! may be lost ([`Losses`]): none, unless a failover was to a standby that lacked them.
//!
//! # One content for each seq
//!
//! A seq has one content, acknowledged or not, in every history without losses: crashes, outages, and failovers to a
//! standby that had everything. If messages may be lost, the seq of one of them may come back with another message,
//! until a client has acknowledged it; and a tombstone may come back as a message, since its settlement may be lost.
//!
//! # Order
//!
//! Mailboxes and lists of REST have different orders. The seq of a delivery is assigned in the commit, under the lock
//! of its mailbox head; lists are sorted by the ids of messages, which are drawn before the commit. Posts that overlap
//! may therefore be listed in one order and numbered in the other: between the id and the commit of one, another
//! process may draw a higher id and commit first, or the same process, if it commits a batch again after a lost lock
//! race or an unknown outcome. Two rules hold for the messages of all senders:
//!
//! - A post that was asked for after another was accepted has the higher seq in each mailbox, and the later place in
//!   each list. So the two orders are the same for posts that do not overlap.
//! - Recipients that share messages receive them in the same order, also those of overlapping posts: one transaction
//!   locks the heads of all recipients of a message. A fan-out in chunks has several (ADR 0060); record one recipient
//!   of it.

mod rules;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Instant of a history: later events have higher ones.
pub type Tick = u64;

/// Returns the next instant, for a request that begins or an answer that arrives.
pub fn tick() -> Tick {
    static CLOCK: AtomicU64 = AtomicU64::new(1);
    // One order for all threads: the rules compare instants of different clients.
    CLOCK.fetch_add(1, Ordering::SeqCst)
}

/// Answer to a post, as its sender knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Accepted as the message with this id.
    Accepted(String),
    /// Refused with this status; nothing was to be done.
    Refused(u16),
    /// The connection ended without an answer.
    None,
}

/// Post with its answer. Repetitions of one request with one idempotency key are one post each.
#[derive(Clone, Debug)]
pub struct Post {
    pub asked_at: Tick,
    pub answered_at: Tick,
    /// Idempotency key, if it had one.
    pub key: Option<String>,
    /// Unique text of the message.
    pub text: String,
    pub recipients: Vec<String>,
    pub answer: Answer,
}

/// Content that an agent received under a seq.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    pub delivery_id: String,
    /// Text of the message; `None` for a tombstone.
    pub text: Option<String>,
}

/// Accepted messages that recipients may lack.
#[derive(Clone, Copy, Debug)]
pub enum Losses<'a> {
    /// None, and numbers do not jump: crashes, outages, and failovers to a standby that had everything.
    None,
    /// Messages that are not stored and that were accepted, or were to be, in one of these spans: of each failover,
    /// from the last instant at which the standby had everything to the end of its promotion. Heads may have jumped.
    /// Without a span nothing may be lost.
    Within(&'a [Range<Tick>]),
}

/// Positions of a mailbox as the engine has stored them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floors {
    /// Highest assigned seq.
    pub head: u64,
    /// Highest seq that was sent.
    pub sent: u64,
    /// Ack floor of the socket.
    pub acked: u64,
    /// Settled floor.
    pub settled: u64,
}

/// Breach of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// An accepted message was not received.
    Lost { agent: String, text: String },
    /// A message was received under several seqs.
    Repeated { agent: String, text: String, seqs: Vec<u64> },
    /// A message was received whose sender was refused.
    Unaccepted { agent: String, text: String },
    /// A seq came back with another content. If its message may be lost it may, until it is acknowledged.
    TwoContents { agent: String, seq: u64, first: Content, second: Content, was_acked: bool },
    /// A message that was accepted before another was sent has the higher seq.
    Reordered { agent: String, earlier: String, later: String },
    /// A client acknowledged what it had not received. This is a fault of the test.
    AckAboveSent { agent: String, acked: u64, received: u64 },
    /// Requests with one idempotency key have different results.
    TwoResults { key: String, messages: Vec<String> },
    /// The messages with a text are not those that its posts were answered with.
    StoredOtherwise { text: String, answers: Vec<Answer>, stored: Vec<String> },
    /// A message that was accepted before another was sent is listed behind it.
    ListedOutOfOrder { earlier: String, later: String },
    /// The first agent received one message before the other, and the second agent after it.
    Disagreement { agents: [String; 2], earlier: String, later: String },
    /// A position is above the last assigned seq, or more is acknowledged than was sent.
    FloorsOutOfOrder { agent: String, floors: Floors },
    /// The engine took more for acknowledged than the client had received.
    FloorAboveReceived { agent: String, floors: Floors, received: u64 },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { agent, text } => write!(f, "{agent} never received the accepted {text:?}"),
            Self::Repeated { agent, text, seqs } => write!(f, "{agent} received {text:?} as {seqs:?}"),
            Self::Unaccepted { agent, text } => write!(f, "{agent} received the refused {text:?}"),
            Self::TwoContents { agent, seq, first, second, was_acked } => {
                let acked = if *was_acked { "acknowledged" } else { "not acknowledged" };
                write!(f, "{agent}: seq {seq} was {first:?}, {acked}, and came back as {second:?}")
            }
            Self::Reordered { agent, earlier, later } => write!(f, "{agent} received {later:?} before {earlier:?}"),
            Self::AckAboveSent { agent, acked, received } => {
                write!(f, "{agent} acknowledged {acked}, having received {received}")
            }
            Self::TwoResults { key, messages } => write!(f, "the key {key} was answered with {messages:?}"),
            Self::StoredOtherwise { text, answers, stored } => {
                write!(f, "{text:?} was answered with {answers:?} and is stored as {stored:?}")
            }
            Self::ListedOutOfOrder { earlier, later } => write!(f, "{later:?} is listed before {earlier:?}"),
            Self::Disagreement { agents: [one, other], earlier, later } => {
                write!(f, "{one} received {earlier:?} before {later:?}, and {other} after it")
            }
            Self::FloorsOutOfOrder { agent, floors } => write!(f, "{agent}: {floors:?}"),
            Self::FloorAboveReceived { agent, floors, received } => {
                write!(f, "{agent} received {received}, and its mailbox is at {floors:?}")
            }
        }
    }
}

#[derive(Debug, Default)]
struct Mailbox {
    /// Last content of each seq.
    contents: BTreeMap<u64, Content>,
    received: u64,
    acked: u64,
}

#[derive(Debug, Default)]
struct Records {
    posts: Vec<Post>,
    mailboxes: HashMap<String, Mailbox>,
    /// Agents and texts of deliveries that end without being received.
    allowed_losses: HashSet<(String, String)>,
    /// Ids of all stored messages by text, once recorded.
    stored: Option<HashMap<String, Vec<String>>>,
    /// Texts of conversations, oldest first.
    listings: Vec<Vec<String>>,
    floors: BTreeMap<String, Floors>,
    /// Frames whose seq its agent had received before.
    repeated_frames: u64,
    /// Breaches that later records cannot show any more.
    breaches: Vec<Violation>,
}

/// Records of one test, shared by all its clients.
#[derive(Debug, Default)]
pub struct History {
    records: Mutex<Records>,
}

impl History {
    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a post and its answer.
    pub fn record_post(&self, post: Post) {
        self.records().posts.push(post);
    }

    /// Records a frame. A tombstone may stand for a content received earlier.
    pub fn record_frame(&self, agent: &str, seq: u64, content: Content) {
        let records = &mut *self.records();
        let mailbox = records.mailboxes.entry(agent.to_owned()).or_default();
        mailbox.received = mailbox.received.max(seq);
        records.repeated_frames += u64::from(mailbox.contents.contains_key(&seq));
        let was_acked = seq <= mailbox.acked;
        let breach = match mailbox.contents.get(&seq) {
            Some(first) if *first == content || content.text.is_none() => return,
            first => first.map(|first| Violation::TwoContents {
                agent: agent.to_owned(),
                seq,
                first: first.clone(),
                second: content.clone(),
                was_acked,
            }),
        };
        // A client takes what it has acknowledged for a repetition.
        if breach.is_none() || !was_acked {
            mailbox.contents.insert(seq, content);
        }
        records.breaches.extend(breach);
    }

    /// Records an ack that a client sends.
    pub fn record_ack(&self, agent: &str, acked: u64) {
        let mut records = self.records();
        let mailbox = records.mailboxes.entry(agent.to_owned()).or_default();
        mailbox.acked = mailbox.acked.max(acked);
        let received = mailbox.received;
        if acked > received {
            records.breaches.push(Violation::AckAboveSent { agent: agent.to_owned(), acked, received });
        }
    }

    /// Allows that a delivery is not received, because it expired, was settled over REST, or met a full mailbox.
    pub fn allow_loss(&self, agent: &str, text: &str) {
        self.records().allowed_losses.insert((agent.to_owned(), text.to_owned()));
    }

    /// Records the ids of all messages that are stored at the end, by text.
    pub fn record_stored(&self, messages: HashMap<String, Vec<String>>) {
        self.records().stored = Some(messages);
    }

    /// Records the texts of a channel or conversation as REST lists them, oldest first.
    pub fn record_listing(&self, texts: Vec<String>) {
        self.records().listings.push(texts);
    }

    /// Records the positions of a mailbox at the end.
    pub fn record_floors(&self, agent: &str, floors: Floors) {
        self.records().floors.insert(agent.to_owned(), floors);
    }

    /// Returns the ids under which posts were accepted and that are not stored.
    pub fn lost_ids(&self) -> Vec<String> {
        let records = self.records();
        let stored = records.stored.as_ref();
        let is_stored =
            |text: &str, id: &String| stored.is_none_or(|stored| stored.get(text).is_some_and(|ids| ids.contains(id)));
        let lost = records.posts.iter().filter_map(|post| match &post.answer {
            Answer::Accepted(id) if !is_stored(&post.text, id) => Some(id.clone()),
            Answer::Accepted(_) | Answer::Refused(_) | Answer::None => None,
        });
        lost.collect()
    }

    /// Returns the number of messages that were accepted.
    pub fn accepted_count(&self) -> usize {
        let records = self.records();
        let accepted = records.posts.iter().filter_map(|post| match &post.answer {
            Answer::Accepted(id) => Some(id),
            Answer::Refused(_) | Answer::None => None,
        });
        accepted.collect::<HashSet<_>>().len()
    }

    /// Returns the number of posts that were refused or not answered.
    pub fn refused_count(&self) -> usize {
        self.records().posts.iter().filter(|post| !matches!(post.answer, Answer::Accepted(_))).count()
    }

    /// Returns the number of frames whose seq its agent had received before.
    pub fn repeated_frames(&self) -> u64 {
        self.records().repeated_frames
    }

    /// Returns the breaches that frames and acks alone have shown so far.
    pub fn breaches(&self) -> Vec<Violation> {
        self.records().breaches.clone()
    }

    /// Judges the history, once every delivery has arrived.
    pub fn violations(&self, losses: Losses<'_>) -> Vec<Violation> {
        rules::judge(&self.records(), losses)
    }
}

#[cfg(test)]
mod tests;
