//! History of what clients did and saw, and the rules that it must keep whatever faults happened meanwhile.
//!
//! Tests record posts with their answers, frames and acks into a [`History`], and [`History::violations`] judges it. The
//! rules know no time and no implementation, so that tests of crashes, outages and failovers share them. The caller says
//! which accepted messages may be lost ([`Losses`]): none, unless a failover was to a standby that lacked them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
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
    None,
    /// Messages whose ids the database does not know: it never had them.
    Unknown(&'a HashSet<String>),
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
    /// A seq came back with another content. After a failover it may, until it is acknowledged.
    TwoContents { agent: String, seq: u64, first: Content, second: Content, was_acked: bool },
    /// A message that was accepted before another was sent has the higher seq.
    Reordered { agent: String, earlier: String, later: String },
    /// A client acknowledged what it had not received. This is a fault of the test.
    AckAboveSent { agent: String, acked: u64, received: u64 },
    /// Requests with one idempotency key have different results.
    TwoResults { key: String, messages: Vec<String> },
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
        let mut records = self.records();
        let mailbox = records.mailboxes.entry(agent.to_owned()).or_default();
        mailbox.received = mailbox.received.max(seq);
        let was_acked = seq <= mailbox.acked;
        let breach = match mailbox.contents.get(&seq) {
            Some(first) if *first == content || content.text.is_none() => return,
            Some(first) if first.text.is_some() => Some(Violation::TwoContents {
                agent: agent.to_owned(),
                seq,
                first: first.clone(),
                second: content.clone(),
                was_acked,
            }),
            _ => None,
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

    /// Returns the ids under which posts were accepted.
    pub fn accepted_ids(&self) -> HashSet<String> {
        let records = self.records();
        let accepted = records.posts.iter().filter_map(|post| match &post.answer {
            Answer::Accepted(id) => Some(id.clone()),
            Answer::Refused(_) | Answer::None => None,
        });
        accepted.collect()
    }

    /// Returns the breaches that frames and acks alone have shown so far.
    pub fn breaches(&self) -> Vec<Violation> {
        self.records().breaches.clone()
    }

    /// Judges the history, once every delivery has arrived.
    pub fn violations(&self, losses: Losses<'_>) -> Vec<Violation> {
        let records = self.records();
        let may_change = matches!(losses, Losses::Unknown(_));
        let is_allowed =
            |breach: &&Violation| !(may_change && matches!(breach, Violation::TwoContents { was_acked: false, .. }));
        let mut violations: Vec<Violation> = records.breaches.iter().filter(is_allowed).cloned().collect();
        check_results(&records.posts, &mut violations);
        let nothing = Mailbox::default();
        for agent in recipients(&records.posts) {
            let mailbox = records.mailboxes.get(agent).unwrap_or(&nothing);
            check_mailbox(agent, mailbox, &records.posts, losses, &mut violations);
        }
        violations
    }
}

fn recipients(posts: &[Post]) -> Vec<&str> {
    let mut names: Vec<&str> = posts.iter().flat_map(|post| &post.recipients).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// One result per idempotency key.
fn check_results(posts: &[Post], violations: &mut Vec<Violation>) {
    let mut results: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for post in posts {
        if let (Some(key), Answer::Accepted(id)) = (&post.key, &post.answer) {
            let of_key = results.entry(key).or_default();
            if !of_key.contains(id) {
                of_key.push(id.clone());
            }
        }
    }
    let different = results.into_iter().filter(|(_, messages)| messages.len() > 1);
    violations.extend(different.map(|(key, messages)| Violation::TwoResults { key: key.to_owned(), messages }));
}

/// Accepted messages are received, once, in the order in which they were accepted; refused ones are not received.
fn check_mailbox(agent: &str, mailbox: &Mailbox, posts: &[Post], losses: Losses<'_>, violations: &mut Vec<Violation>) {
    let mut seqs: HashMap<&str, Vec<u64>> = HashMap::new();
    for (seq, content) in &mailbox.contents {
        if let Some(text) = &content.text {
            seqs.entry(text).or_default().push(*seq);
        }
    }
    let accepted: HashSet<&str> =
        posts.iter().filter(|post| is_accepted(post)).map(|post| post.text.as_str()).collect();
    let mut received: Vec<(&Post, u64)> = Vec::new();
    for post in posts.iter().filter(|post| post.recipients.iter().any(|name| name == agent)) {
        let text = post.text.clone();
        let agent = agent.to_owned();
        match (&post.answer, seqs.get(post.text.as_str()).map(Vec::as_slice)) {
            (Answer::Accepted(id), None) if !may_be_lost(losses, id) => {
                violations.push(Violation::Lost { agent, text });
            }
            (Answer::Accepted(_), Some([seq])) => received.push((post, *seq)),
            (Answer::Accepted(_) | Answer::None, Some(seqs)) if seqs.len() > 1 => {
                violations.push(Violation::Repeated { agent, text, seqs: seqs.to_vec() });
            }
            // Another request with the same text and key may have been accepted.
            (Answer::Refused(_), Some(_)) if !accepted.contains(post.text.as_str()) => {
                violations.push(Violation::Unaccepted { agent, text });
            }
            _ => {}
        }
    }
    received.sort_unstable_by_key(|(_, seq)| *seq);
    // Of all messages with a lower seq, the latest begin decides: none may have begun after this one was accepted.
    let mut latest: Option<&Post> = None;
    for (post, _) in received {
        if let Some(lower) = latest.filter(|lower| lower.asked_at > post.answered_at) {
            let (earlier, later) = (post.text.clone(), lower.text.clone());
            violations.push(Violation::Reordered { agent: agent.to_owned(), earlier, later });
        }
        if latest.is_none_or(|lower| lower.asked_at < post.asked_at) {
            latest = Some(post);
        }
    }
}

fn is_accepted(post: &Post) -> bool {
    matches!(post.answer, Answer::Accepted(_))
}

fn may_be_lost(losses: Losses<'_>, id: &str) -> bool {
    match losses {
        Losses::None => false,
        Losses::Unknown(unknown) => unknown.contains(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(text: &str, answer: Answer) -> Post {
        let (asked_at, answered_at) = (tick(), tick());
        Post { asked_at, answered_at, key: None, text: text.to_owned(), recipients: vec!["ada".to_owned()], answer }
    }

    fn accepted(text: &str) -> Post {
        post(text, Answer::Accepted(format!("id of {text}")))
    }

    fn content(text: &str) -> Content {
        Content { delivery_id: format!("delivery of {text}"), text: Some(text.to_owned()) }
    }

    fn tombstone() -> Content {
        Content { delivery_id: String::new(), text: None }
    }

    /// History of these posts, frames and one ack after them.
    fn history(posts: Vec<Post>, frames: &[(u64, Content)], acked: u64) -> History {
        let history = History::default();
        posts.into_iter().for_each(|post| history.record_post(post));
        frames.iter().for_each(|(seq, content)| history.record_frame("ada", *seq, content.clone()));
        history.record_ack("ada", acked);
        history
    }

    #[test]
    fn a_correct_history_has_no_violations() {
        let posts = vec![
            accepted("one"),
            post("refused", Answer::Refused(503)),
            post("unknown", Answer::None),
            accepted("two"),
            post("unknown but stored", Answer::None),
        ];
        let frames = [
            (1, content("one")),
            (2, content("two")),
            (1, content("one")),
            (3, content("unknown but stored")),
            (2, tombstone()),
        ];
        assert_eq!(history(posts, &frames, 3).violations(Losses::None), []);
    }

    #[test]
    fn each_rule_finds_its_breach() {
        let ada = || "ada".to_owned();
        let one = || accepted("one");
        let found = |posts, frames: &[(u64, Content)], acked| history(posts, frames, acked).violations(Losses::None);
        assert_eq!(found(vec![one()], &[], 0), [Violation::Lost { agent: ada(), text: "one".into() }]);
        assert_eq!(
            found(vec![one()], &[(1, content("one")), (2, content("one"))], 2),
            [Violation::Repeated { agent: ada(), text: "one".into(), seqs: vec![1, 2] }]
        );
        assert_eq!(
            found(vec![post("no", Answer::Refused(503))], &[(1, content("no"))], 1),
            [Violation::Unaccepted { agent: ada(), text: "no".into() }]
        );
        assert_eq!(
            found(vec![one(), accepted("two")], &[(1, content("two")), (2, content("one"))], 2),
            [Violation::Reordered { agent: ada(), earlier: "one".into(), later: "two".into() }]
        );
        assert_eq!(
            found(vec![one()], &[(1, content("one"))], 2),
            [Violation::AckAboveSent { agent: ada(), acked: 2, received: 1 }]
        );
    }

    #[test]
    fn concurrent_posts_may_have_any_order() {
        let (mut one, mut two) = (accepted("one"), accepted("two"));
        (two.asked_at, one.answered_at) = (one.answered_at, two.answered_at + 1);
        one.asked_at = two.asked_at;
        assert_eq!(
            history(vec![one, two], &[(1, content("two")), (2, content("one"))], 2).violations(Losses::None),
            []
        );
    }

    #[test]
    fn a_seq_may_change_its_content_until_it_is_acknowledged() {
        let posts = || vec![accepted("new")];
        let failover = HashSet::new();
        let before = history(posts(), &[(1, content("old")), (1, content("new"))], 1);
        assert_eq!(before.violations(Losses::Unknown(&failover)), []);
        assert_eq!(before.violations(Losses::None).len(), 1, "without a failover it may not");
        let after = history(posts(), &[(1, content("old"))], 1);
        after.record_frame("ada", 1, content("new"));
        let found = after.violations(Losses::Unknown(&failover));
        let [Violation::TwoContents { was_acked: true, .. }, Violation::Lost { .. }] = found.as_slice() else {
            panic!("{found:?}");
        };
    }

    #[test]
    fn a_key_has_one_result() {
        let keyed = |id: &str| Post { key: Some("k".into()), ..post("one", Answer::Accepted(id.into())) };
        let history = history(vec![keyed("1"), keyed("1"), keyed("2")], &[(1, content("one"))], 1);
        let messages = vec!["1".to_owned(), "2".to_owned()];
        assert_eq!(history.violations(Losses::None), [Violation::TwoResults { key: "k".into(), messages }]);
    }

    #[test]
    fn only_messages_that_the_database_never_had_may_be_lost() {
        let history = history(vec![accepted("kept"), accepted("lost")], &[(1, content("kept"))], 1);
        let unknown = HashSet::from(["id of lost".to_owned()]);
        assert_eq!(history.violations(Losses::Unknown(&unknown)), []);
        assert_eq!(history.violations(Losses::Unknown(&HashSet::new())).len(), 1);
    }
}
