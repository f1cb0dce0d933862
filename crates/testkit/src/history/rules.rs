//! Rules that every history keeps.

use std::collections::{BTreeMap, HashMap};

use super::{Answer, Losses, Mailbox, Post, Records, Tick, Violation};

/// Message with the requests for it that were not refused: a retry, or a repetition after its acceptance, writes no
/// other.
struct Message<'a> {
    /// First of the requests.
    post: &'a Post,
    asked_at: Tick,
    /// First answer that accepted it, or else the first end of a connection.
    answered_at: Tick,
    is_accepted: bool,
}

impl<'a> Message<'a> {
    fn new(posts: &[&'a Post]) -> Option<Self> {
        let begun: Vec<&Post> =
            posts.iter().copied().filter(|post| !matches!(post.answer, Answer::Refused(_))).collect();
        let accepted = begun.iter().filter(|post| matches!(post.answer, Answer::Accepted(_)));
        let accepted_at = accepted.map(|post| post.answered_at).min();
        let post = *begun.iter().min_by_key(|post| post.asked_at)?;
        let answered_at = accepted_at.or(begun.iter().map(|post| post.answered_at).min())?;
        Some(Self { post, asked_at: post.asked_at, answered_at, is_accepted: accepted_at.is_some() })
    }
}

type Messages<'a> = BTreeMap<&'a str, Message<'a>>;

type Seqs<'a> = HashMap<&'a str, Vec<u64>>;

/// Returns the breaches of all rules.
pub(super) fn judge(records: &Records, losses: Losses<'_>) -> Vec<Violation> {
    let is_breach = |breach: &&Violation| !may_change(breach, &records.posts, losses);
    let mut violations: Vec<Violation> = records.breaches.iter().filter(is_breach).cloned().collect();
    let posts = by_text(&records.posts);
    let messages: Messages<'_> = posts.iter().filter_map(|(text, posts)| Some((*text, Message::new(posts)?))).collect();
    check_results(&records.posts, &mut violations);
    check_stored(&posts, records, losses, &mut violations);
    check_listings(&messages, records, &mut violations);
    let nothing = Mailbox::default();
    let mut seqs_by_agent = HashMap::new();
    for agent in recipients(&records.posts) {
        let mailbox = records.mailboxes.get(agent).unwrap_or(&nothing);
        let seqs = seqs_by_text(mailbox);
        check_received(agent, &seqs, records, losses, &mut violations);
        check_order(agent, &seqs, &messages, &mut violations);
        seqs_by_agent.insert(agent, seqs);
    }
    check_agreement(&seqs_by_agent, &messages, &mut violations);
    check_floors(records, losses, &mut violations);
    violations
}

/// Returns whether a seq may have come back with another content, because a failover may have lost the first one: its
/// message, or of a tombstone its settlement.
fn may_change(breach: &Violation, posts: &[Post], losses: Losses<'_>) -> bool {
    let Violation::TwoContents { first, was_acked: false, .. } = breach else { return false };
    match &first.text {
        Some(text) => posts.iter().any(|post| post.text == *text && may_be_lost(post, losses)),
        None => matches!(losses, Losses::Within(spans) if spans.iter().any(|span| !span.is_empty())),
    }
}

fn recipients(posts: &[Post]) -> Vec<&str> {
    let mut names: Vec<&str> = posts.iter().flat_map(|post| &post.recipients).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn by_text(posts: &[Post]) -> BTreeMap<&str, Vec<&Post>> {
    let mut groups: BTreeMap<&str, Vec<&Post>> = BTreeMap::new();
    for post in posts {
        groups.entry(&post.text).or_default().push(post);
    }
    groups
}

fn seqs_by_text(mailbox: &Mailbox) -> Seqs<'_> {
    let mut seqs = Seqs::new();
    for (seq, content) in &mailbox.contents {
        if let Some(text) = &content.text {
            seqs.entry(text).or_default().push(*seq);
        }
    }
    seqs
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

/// Accepted messages are stored, refused ones are not, and a post without an answer is stored once at most.
fn check_stored(
    posts: &BTreeMap<&str, Vec<&Post>>,
    records: &Records,
    losses: Losses<'_>,
    violations: &mut Vec<Violation>,
) {
    let Some(stored) = &records.stored else { return };
    for (text, posts) in posts {
        let stored = stored.get(*text).map_or(&[][..], Vec::as_slice);
        let accepted =
            |id: &String| posts.iter().any(|post| matches!(&post.answer, Answer::Accepted(own) if own == id));
        let is_kept = |post: &&Post| match &post.answer {
            Answer::Accepted(id) => stored.contains(id) || may_be_lost(post, losses),
            Answer::Refused(_) | Answer::None => true,
        };
        let unanswered = posts.iter().filter(|post| post.answer == Answer::None).count();
        let unexplained = stored.iter().filter(|id| !accepted(id)).count();
        if !posts.iter().all(is_kept) || unexplained > unanswered {
            let answers = posts.iter().map(|post| post.answer.clone()).collect();
            violations.push(Violation::StoredOtherwise { text: (*text).to_owned(), answers, stored: stored.to_vec() });
        }
    }
}

/// Lists have the order in which messages were accepted.
fn check_listings(messages: &Messages<'_>, records: &Records, violations: &mut Vec<Violation>) {
    for listing in &records.listings {
        let found = find_disorder(listing.iter().filter_map(|text| messages.get(text.as_str())));
        violations.extend(found.into_iter().map(|(earlier, later)| Violation::ListedOutOfOrder { earlier, later }));
    }
}

/// Accepted messages are received, once; refused ones are not received.
fn check_received(
    agent: &str,
    seqs: &Seqs<'_>,
    records: &Records,
    losses: Losses<'_>,
    violations: &mut Vec<Violation>,
) {
    for post in records.posts.iter().filter(|post| post.recipients.iter().any(|name| name == agent)) {
        let (agent, text) = (agent.to_owned(), post.text.clone());
        match (&post.answer, seqs.get(post.text.as_str()).map(Vec::as_slice)) {
            (Answer::Accepted(_) | Answer::None, None) if must_arrive(&agent, post, records, losses) => {
                violations.push(Violation::Lost { agent, text });
            }
            (Answer::Accepted(_) | Answer::None, Some(seqs)) if seqs.len() > 1 => {
                violations.push(Violation::Repeated { agent, text, seqs: seqs.to_vec() });
            }
            // Another request with the same text and key may have been accepted.
            (Answer::Refused(_), Some(_)) if !is_accepted(&post.text, &records.posts) => {
                violations.push(Violation::Unaccepted { agent, text });
            }
            _ => {}
        }
    }
}

/// Accepted messages are received in the order in which they were accepted.
fn check_order(agent: &str, seqs: &Seqs<'_>, messages: &Messages<'_>, violations: &mut Vec<Violation>) {
    let accepted = messages.values().filter(|message| message.is_accepted);
    let mut received: Vec<(u64, &Message<'_>)> =
        accepted.filter_map(|message| Some((seq_of(message, agent, seqs)?, message))).collect();
    received.sort_unstable_by_key(|(seq, _)| *seq);
    let found = find_disorder(received.into_iter().map(|(_, message)| message));
    violations.extend(found.into_iter().map(|(earlier, later)| Violation::Reordered {
        agent: agent.to_owned(),
        earlier,
        later,
    }));
}

/// Recipients that share messages receive them in the same order.
fn check_agreement(seqs: &HashMap<&str, Seqs<'_>>, messages: &Messages<'_>, violations: &mut Vec<Violation>) {
    let mut shared: BTreeMap<[&str; 2], Vec<([u64; 2], &str)>> = BTreeMap::new();
    for message in messages.values() {
        let recipients = message.post.recipients.iter().map(String::as_str);
        let mut received: Vec<(&str, u64)> =
            recipients.filter_map(|agent| Some((agent, seq_of(message, agent, seqs.get(agent)?)?))).collect();
        received.sort_unstable();
        for (nth, (one, seq)) in received.iter().enumerate() {
            for (other, other_seq) in &received[nth + 1..] {
                shared.entry([one, other]).or_default().push(([*seq, *other_seq], &message.post.text));
            }
        }
    }
    for (agents, mut received) in shared {
        received.sort_unstable();
        // Neighbours suffice: where any two are reversed, two neighbours are.
        let reversed = received.windows(2).filter(|pair| pair[0].0[1] > pair[1].0[1]);
        violations.extend(reversed.map(|pair| Violation::Disagreement {
            agents: agents.map(str::to_owned),
            earlier: pair[0].1.to_owned(),
            later: pair[1].1.to_owned(),
        }));
    }
}

/// Returns the seq under which a recipient received a message; `None` also if there are several.
fn seq_of(message: &Message<'_>, agent: &str, seqs: &Seqs<'_>) -> Option<u64> {
    let is_recipient = message.post.recipients.iter().any(|name| name == agent);
    match seqs.get(message.post.text.as_str()).map(Vec::as_slice) {
        Some([seq]) if is_recipient => Some(*seq),
        _ => None,
    }
}

/// Returns pairs in which a message that was accepted before the other was sent comes after it.
fn find_disorder<'a>(ordered: impl Iterator<Item = &'a Message<'a>>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    // Of all messages so far, the latest begin decides: none may have begun after this one was accepted.
    let mut latest: Option<&Message<'_>> = None;
    for message in ordered {
        if let Some(before) = latest.filter(|before| before.asked_at > message.answered_at) {
            found.push((message.post.text.clone(), before.post.text.clone()));
        }
        if latest.is_none_or(|before| before.asked_at < message.asked_at) {
            latest = Some(message);
        }
    }
    found
}

/// Positions never exceed the head, nor acks the last seq that was sent. Without a failover, after which heads jump,
/// acks do not exceed the last seq that the client received either.
fn check_floors(records: &Records, losses: Losses<'_>, violations: &mut Vec<Violation>) {
    for (agent, floors) in &records.floors {
        let (agent, floors) = (agent.clone(), *floors);
        let received = records.mailboxes.get(&agent).map(|mailbox| mailbox.received);
        if floors.sent.max(floors.settled) > floors.head || floors.acked > floors.sent {
            violations.push(Violation::FloorsOutOfOrder { agent, floors });
        } else if let (Losses::None, Some(received)) = (losses, received)
            && floors.acked > received
        {
            violations.push(Violation::FloorAboveReceived { agent, floors, received });
        }
    }
}

/// A post without an answer counts as accepted if it is stored.
fn must_arrive(agent: &str, post: &Post, records: &Records, losses: Losses<'_>) -> bool {
    let stored = records.stored.as_ref().map(|stored| stored.get(&post.text).map_or(&[][..], Vec::as_slice));
    let is_accepted = match (&post.answer, stored) {
        (Answer::Accepted(id), Some(stored)) => stored.contains(id) || !may_be_lost(post, losses),
        (Answer::Accepted(_), None) => true,
        (Answer::None, stored) => stored.is_some_and(|stored| !stored.is_empty()),
        (Answer::Refused(_), _) => false,
    };
    is_accepted && !records.allowed_losses.contains(&(agent.to_owned(), post.text.clone()))
}

fn is_accepted(text: &str, posts: &[Post]) -> bool {
    posts.iter().any(|post| post.text == text && matches!(post.answer, Answer::Accepted(_)))
}

fn may_be_lost(post: &Post, losses: Losses<'_>) -> bool {
    match losses {
        Losses::None => false,
        Losses::Within(spans) => spans.iter().any(|span| post.answered_at > span.start && post.asked_at < span.end),
    }
}
