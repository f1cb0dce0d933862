//! Each rule finds its breach, and nothing else.

use super::*;

fn post(text: &str, answer: Answer) -> Post {
    let (asked_at, answered_at) = (tick(), tick());
    let (text, recipients) = (text.to_owned(), vec!["ada".to_owned()]);
    Post { asked_at, answered_at, key: None, text, recipients, answer }
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
    let history = history(posts, &frames, 3);
    assert_eq!(history.violations(Losses::None), []);
    assert_eq!((history.accepted_count(), history.refused_count(), history.repeated_frames()), (2, 3, 2));
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
    assert_eq!(history(vec![one, two], &[(1, content("two")), (2, content("one"))], 2).violations(Losses::None), []);
}

/// History in which seq 1 was `first` and, after an ack of it or before, came back as "new".
fn two_contents(first: Content, is_acked: bool) -> History {
    let history = history(Vec::new(), &[(1, first)], u64::from(is_acked));
    history.record_post(accepted("new"));
    history.record_frame("ada", 1, content("new"));
    history.record_stored(stored(&[("new", "id of new")]));
    history
}

fn is_two_contents(violations: &[Violation]) -> bool {
    violations.iter().any(|one| matches!(one, Violation::TwoContents { .. }))
}

#[test]
fn without_losses_a_seq_has_one_content() {
    let nothing = 0..0;
    for losses in [Losses::None, Losses::Within(&[]), Losses::Within(std::slice::from_ref(&nothing))] {
        for first in [content("old"), tombstone()] {
            for is_acked in [false, true] {
                let history = two_contents(first.clone(), is_acked);
                history.record_post(accepted("old"));
                let found = history.violations(losses);
                assert!(is_two_contents(&found), "{first:?}, {losses:?}: {found:?}");
            }
        }
        let received = [(1, content("new")), (1, content("new")), (1, tombstone())];
        assert_eq!(history(vec![accepted("new")], &received, 1).violations(losses), []);
    }
}

#[test]
fn the_seq_of_a_lost_message_may_change_its_content_until_it_is_acknowledged() {
    let began = tick();
    let (old, is_lost) = (accepted("old"), began..tick());
    let found = |is_acked, losses| {
        let history = two_contents(content("old"), is_acked);
        history.record_post(old.clone());
        history.violations(Losses::Within(std::slice::from_ref(losses)))
    };
    assert_eq!(found(false, &is_lost), []);
    let after = found(true, &is_lost);
    let [Violation::TwoContents { was_acked: true, .. }, Violation::Lost { .. }] = after.as_slice() else {
        panic!("{after:?}");
    };
    let later = tick()..tick();
    assert!(is_two_contents(&found(false, &later)), "it was not lost by then");
    let settlement = two_contents(tombstone(), false).violations(Losses::Within(std::slice::from_ref(&is_lost)));
    assert_eq!(settlement, [], "a settlement may be lost");
}

#[test]
fn a_key_has_one_result() {
    let keyed = |id: &str| Post { key: Some("k".into()), ..post("one", Answer::Accepted(id.into())) };
    let history = history(vec![keyed("1"), keyed("1"), keyed("2")], &[(1, content("one"))], 1);
    let messages = vec!["1".to_owned(), "2".to_owned()];
    assert_eq!(history.violations(Losses::None), [Violation::TwoResults { key: "k".into(), messages }]);
}

#[test]
fn only_unstored_messages_of_a_failover_may_be_lost() {
    let history = history(vec![accepted("kept")], &[(1, content("kept"))], 1);
    let began = tick();
    history.record_post(accepted("lost"));
    let (failover, earlier) = (began..tick(), 0..began);
    let spans = std::slice::from_ref(&failover);
    let lost = || Violation::Lost { agent: "ada".into(), text: "lost".into() };
    assert_eq!(history.violations(Losses::Within(spans)), [lost()], "it may be stored");
    history.record_stored(stored(&[("kept", "id of kept")]));
    assert_eq!(history.violations(Losses::Within(spans)), []);
    assert_eq!(history.lost_ids(), ["id of lost"]);
    let spans = std::slice::from_ref(&earlier);
    let [Violation::StoredOtherwise { .. }, found] = &history.violations(Losses::Within(spans))[..] else {
        panic!("a message of another time may not be lost");
    };
    assert_eq!(*found, lost());
    assert_eq!(history.violations(Losses::None).len(), 2);
}

#[test]
fn stored_messages_match_the_answers_to_senders() {
    let found = |answer: Answer, ids: &[&str]| {
        let history = history(vec![post("one", answer)], &[(1, content("one"))], 1);
        history.record_stored(HashMap::from([("one".to_owned(), ids.iter().map(|id| (*id).to_owned()).collect())]));
        let violations = history.violations(Losses::None);
        violations.iter().filter(|one| matches!(one, Violation::StoredOtherwise { .. })).count()
    };
    let accepted = || Answer::Accepted("1".to_owned());
    assert_eq!(found(accepted(), &["1"]), 0);
    assert_eq!(found(accepted(), &["2"]), 1);
    assert_eq!(found(accepted(), &["1", "2"]), 1);
    assert_eq!(found(Answer::Refused(503), &[]), 0);
    assert_eq!(found(Answer::Refused(503), &["1"]), 1);
    assert_eq!(found(Answer::None, &["1"]), 0);
    assert_eq!(found(Answer::None, &["1", "2"]), 1);
}

#[test]
fn a_stored_message_arrives_whatever_its_sender_knows() {
    let history = history(vec![post("unanswered", Answer::None)], &[], 0);
    assert_eq!(history.violations(Losses::None), []);
    history.record_stored(stored(&[("unanswered", "1")]));
    let lost = Violation::Lost { agent: "ada".into(), text: "unanswered".into() };
    assert_eq!(history.violations(Losses::None), [lost]);
    history.allow_loss("ada", "unanswered");
    assert_eq!(history.violations(Losses::None), []);
}

#[test]
fn lists_have_the_order_of_acceptance() {
    let history = history(vec![accepted("one"), accepted("two")], &[(1, content("one")), (2, content("two"))], 2);
    history.record_listing(vec!["one".into(), "not recorded".into(), "two".into()]);
    assert_eq!(history.violations(Losses::None), []);
    history.record_listing(vec!["two".into(), "one".into()]);
    let disorder = Violation::ListedOutOfOrder { earlier: "one".into(), later: "two".into() };
    assert_eq!(history.violations(Losses::None), [disorder]);
}

#[test]
fn a_repeated_request_does_not_move_its_message() {
    let keyed = || Post { key: Some("k".into()), ..accepted("one") };
    let frames = [(1, content("one")), (2, content("two"))];
    let retried = Post { answer: Answer::None, ..keyed() };
    for posts in [vec![keyed(), accepted("two"), keyed()], vec![retried, accepted("two"), keyed()]] {
        let history = history(posts, &frames, 2);
        history.record_stored(stored(&[("one", "id of one"), ("two", "id of two")]));
        history.record_listing(vec!["one".into(), "two".into()]);
        assert_eq!(history.violations(Losses::None), []);
    }
}

/// Posts with the same times, so that they may have any order.
fn overlapping(texts: [&str; 2]) -> [Post; 2] {
    let [one, two] = texts.map(accepted);
    let (asked_at, answered_at) = (one.asked_at, two.answered_at);
    [one, two].map(|post| Post { asked_at, answered_at, ..post })
}

#[test]
fn posts_that_do_not_overlap_are_numbered_as_they_are_listed() {
    let orders = [["one", "two"], ["two", "one"]];
    let found = |posts: Vec<Post>, seqs: [&str; 2], listed: [&str; 2]| {
        let history = history(posts, &[(1, content(seqs[0])), (2, content(seqs[1]))], 2);
        history.record_listing(listed.map(str::to_owned).to_vec());
        history.violations(Losses::None)
    };
    for seqs in orders {
        for listed in orders {
            let posts = vec![accepted("one"), accepted("two")];
            assert_eq!(found(posts, seqs, listed).is_empty(), seqs == orders[0] && listed == orders[0]);
            assert_eq!(found(overlapping(["one", "two"]).into(), seqs, listed), []);
        }
    }
}

#[test]
fn recipients_receive_shared_messages_in_the_same_order() {
    let found = |orders: [[&str; 2]; 2]| {
        let both = ["ada", "bob"];
        let recipients: Vec<String> = both.map(str::to_owned).to_vec();
        let posts = overlapping(["one", "two"]).map(|post| Post { recipients: recipients.clone(), ..post });
        let history = history(posts.into(), &[], 0);
        for (agent, texts) in both.into_iter().zip(orders) {
            (1..).zip(texts).for_each(|(seq, text)| history.record_frame(agent, seq, content(text)));
        }
        history.violations(Losses::None)
    };
    assert_eq!(found([["two", "one"], ["two", "one"]]), []);
    let agents = ["ada".to_owned(), "bob".to_owned()];
    let disagreement = Violation::Disagreement { agents, earlier: "one".into(), later: "two".into() };
    assert_eq!(found([["one", "two"], ["two", "one"]]), [disagreement]);
}

#[test]
fn positions_stay_below_the_head_and_what_was_received() {
    let found = |floors: Floors, losses: Losses<'_>| {
        let history = history(vec![accepted("one")], &[(1, content("one"))], 1);
        history.record_floors("ada", floors);
        history.violations(losses)
    };
    let agent = || "ada".to_owned();
    let correct = Floors { head: 2, sent: 1, acked: 1, settled: 1 };
    assert_eq!(found(correct, Losses::None), []);
    let floors = Floors { settled: 3, ..correct };
    assert_eq!(found(floors, Losses::None), [Violation::FloorsOutOfOrder { agent: agent(), floors }]);
    let floors = Floors { acked: 2, ..correct };
    let out_of_order = [Violation::FloorsOutOfOrder { agent: agent(), floors }];
    assert_eq!(found(floors, Losses::Within(&[])), out_of_order, "more is acknowledged than was sent");
    let floors = Floors { sent: 2, acked: 2, ..correct };
    let above = Violation::FloorAboveReceived { agent: agent(), floors, received: 1 };
    assert_eq!(found(floors, Losses::None), [above]);
    assert_eq!(found(floors, Losses::Within(&[])), [], "heads may have jumped");
}

fn stored(messages: &[(&str, &str)]) -> HashMap<String, Vec<String>> {
    messages.iter().map(|(text, id)| ((*text).to_owned(), vec![(*id).to_owned()])).collect()
}
