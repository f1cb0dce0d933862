//! Rules that every history keeps.

use std::collections::{BTreeMap, HashMap};

use super::{Answer, Losses, Mailbox, Post, Records, Violation};

/// Returns the breaches of all rules.
pub(super) fn judge(records: &Records, losses: Losses<'_>) -> Vec<Violation> {
    let may_change = matches!(losses, Losses::Within(_));
    let is_allowed =
        |breach: &&Violation| !(may_change && matches!(breach, Violation::TwoContents { was_acked: false, .. }));
    let mut violations: Vec<Violation> = records.breaches.iter().filter(is_allowed).cloned().collect();
    check_results(&records.posts, &mut violations);
    check_stored(records, losses, &mut violations);
    check_listings(records, &mut violations);
    let nothing = Mailbox::default();
    for agent in recipients(&records.posts) {
        let mailbox = records.mailboxes.get(agent).unwrap_or(&nothing);
        check_mailbox(agent, mailbox, records, losses, &mut violations);
    }
    check_floors(records, losses, &mut violations);
    violations
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

/// Accepted messages are stored, refused ones are not, and a post without an answer is stored once at most.
fn check_stored(records: &Records, losses: Losses<'_>, violations: &mut Vec<Violation>) {
    let Some(stored) = &records.stored else { return };
    let mut posts: BTreeMap<&str, Vec<&Post>> = BTreeMap::new();
    for post in &records.posts {
        posts.entry(&post.text).or_default().push(post);
    }
    for (text, posts) in posts {
        let stored = stored.get(text).map_or(&[][..], Vec::as_slice);
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
            violations.push(Violation::StoredOtherwise { text: text.to_owned(), answers, stored: stored.to_vec() });
        }
    }
}

/// Lists have the order in which messages were accepted.
fn check_listings(records: &Records, violations: &mut Vec<Violation>) {
    let posts: HashMap<&str, &Post> = records.posts.iter().map(|post| (post.text.as_str(), post)).collect();
    for listing in &records.listings {
        let listed = listing.iter().filter_map(|text| posts.get(text.as_str()).copied());
        let found = find_disorder(listed);
        violations.extend(found.into_iter().map(|(earlier, later)| Violation::ListedOutOfOrder { earlier, later }));
    }
}

/// Accepted messages are received, once, in the order in which they were accepted; refused ones are not received.
fn check_mailbox(
    agent: &str,
    mailbox: &Mailbox,
    records: &Records,
    losses: Losses<'_>,
    violations: &mut Vec<Violation>,
) {
    let mut seqs: HashMap<&str, Vec<u64>> = HashMap::new();
    for (seq, content) in &mailbox.contents {
        if let Some(text) = &content.text {
            seqs.entry(text).or_default().push(*seq);
        }
    }
    let mut received: Vec<(&Post, u64)> = Vec::new();
    for post in records.posts.iter().filter(|post| post.recipients.iter().any(|name| name == agent)) {
        let (agent, text) = (agent.to_owned(), post.text.clone());
        match (&post.answer, seqs.get(post.text.as_str()).map(Vec::as_slice)) {
            (Answer::Accepted(_) | Answer::None, None) if must_arrive(&agent, post, records, losses) => {
                violations.push(Violation::Lost { agent, text });
            }
            (Answer::Accepted(_), Some([seq])) => received.push((post, *seq)),
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
    received.sort_unstable_by_key(|(_, seq)| *seq);
    let found = find_disorder(received.into_iter().map(|(post, _)| post));
    let agent = agent.to_owned();
    violations.extend(found.into_iter().map(|(earlier, later)| Violation::Reordered {
        agent: agent.clone(),
        earlier,
        later,
    }));
}

/// Returns pairs in which a message that was accepted before the other was sent comes after it.
fn find_disorder<'a>(ordered: impl Iterator<Item = &'a Post>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    // Of all messages so far, the latest begin decides: none may have begun after this one was accepted.
    let mut latest: Option<&Post> = None;
    for post in ordered {
        if let Some(before) = latest.filter(|before| before.asked_at > post.answered_at) {
            found.push((post.text.clone(), before.text.clone()));
        }
        if latest.is_none_or(|before| before.asked_at < post.asked_at) {
            latest = Some(post);
        }
    }
    found
}

/// Positions never exceed the head, and without a failover, after which heads jump, nothing counts as acknowledged that
/// the client had not received.
fn check_floors(records: &Records, losses: Losses<'_>, violations: &mut Vec<Violation>) {
    for (agent, floors) in &records.floors {
        let (agent, floors) = (agent.clone(), *floors);
        let received = records.mailboxes.get(&agent).map(|mailbox| mailbox.received);
        if floors.sent.max(floors.acked).max(floors.settled) > floors.head {
            violations.push(Violation::FloorAboveHead { agent, floors });
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
    is_accepted && !records.excused.contains(&(agent.to_owned(), post.text.clone()))
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
