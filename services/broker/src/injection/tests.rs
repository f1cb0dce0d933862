//! The pipeline against a terminal that is written down.

use relay_verification::{
    Level, RequiredChannels, Timestamp,
    strategy::{Learned, Strategy},
};

use super::{AckAnswer, DeliveryMode, Effect, Lead, Pipeline, Profile, ScreenFacts, TypeRequest};
use crate::{
    api::types::Event,
    mailbox::{Author, Message, Origin, Urgency},
};

pub(super) fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

pub(super) fn message(seq: u64, body: &str) -> Message {
    Message {
        delivery_id: format!("del_{seq}"),
        event_id: format!("evt_{seq}"),
        seq: Some(seq),
        author: Author { name: "bob".into(), agent_id: None },
        target: "#room".into(),
        ..Message::example(body)
    }
}

fn pipeline(harness: &str) -> Pipeline {
    let profile = Profile {
        agent: "ada".into(),
        workspace_alias: None,
        strategy: Strategy::builtin(harness),
        usable: RequiredChannels { echo: true, ..RequiredChannels::NONE },
        activity: vec!["Tool:".into()],
        minimum_high: Level::Echoed,
        tool_prefix: None,
        has_suggestions: false,
    };
    Pipeline::new(profile, Learned::new())
}

pub(super) struct Scene {
    pub(super) pipeline: Pipeline,
    pub(super) log: Vec<String>,
}

impl Scene {
    pub(super) fn new(harness: &str, messages: &[Message]) -> Self {
        let mut pipeline = pipeline(harness);
        messages.iter().for_each(|message| pipeline.enqueue(message.clone()));
        pipeline.set_ready();
        Self { pipeline, log: Vec::new() }
    }

    pub(super) fn note(&mut self, effects: Vec<Effect>) -> Vec<(u64, String)> {
        let mut typed = Vec::new();
        for effect in effects {
            match effect {
                Effect::Type(request) => {
                    self.log.push(format!("type {}", request.attempt));
                    typed.push((request.key, request.text));
                }
                Effect::Publish(event) => {
                    if let Event::DeliveryVerified { verification, .. } = *event {
                        self.log.push(format!("verdict {verification}"));
                    } else if let Event::DeliveryUpgraded { delivery, .. } = *event {
                        self.log.push(format!("raise {}", delivery.event_id));
                    } else if matches!(*event, Event::DeliveryActive { .. }) {
                        self.log.push("active".into());
                    }
                }
                Effect::Settle(settlement) => self.log.push(format!("settle {}", settlement.message.event_id)),
                Effect::Fail(failure) => self.log.push(format!("fail {}", failure.attempts)),
                Effect::Held(held) => self.log.push(format!("held {}", held.as_millis())),
                Effect::Withdraw(_) => self.log.push("withdraw".into()),
                Effect::Dequeued(_) | Effect::TaskTyped | Effect::Record(_) | Effect::Suppressed(_) => {}
            }
        }
        typed
    }

    /// Types what is due, and returns the texts.
    pub(super) fn step(&mut self, now: i64) -> Vec<String> {
        let effects = self.pipeline.poll(at(now), &ScreenFacts::default());
        let typed = self.note(effects);
        for (key, _) in &typed {
            self.pipeline.on_began(*key, at(now));
            let written = self.pipeline.on_written(*key, at(now));
            self.note(written);
        }
        typed.into_iter().map(|(_, text)| text).collect()
    }

    pub(super) fn output(&mut self, now: i64, text: &str) {
        let (_, effects) = self.pipeline.on_output(at(now), text.as_bytes());
        self.note(effects);
    }
}

#[test]
fn an_echo_settles_a_message_and_the_next_follows_in_order() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    let first = scene.step(0);
    assert_eq!(first, ["Relay message from bob in #room [evt_1]: one"]);
    assert!(scene.step(50).is_empty(), "the pause");
    scene.output(60, &format!("{}\r\n", first[0]));
    let second = scene.step(100);
    assert_eq!(second, ["Relay message from bob in #room [evt_2]: two"]);
    scene.output(110, &format!("{}\r\nTool: x", second[0]));
    scene.output(120, "Tool: y");
    assert_eq!(
        scene.log,
        [
            "type 1",
            "verdict echo",
            "settle evt_1",
            "type 1",
            "raise evt_1",
            "active",
            "verdict echo",
            "settle evt_2",
            "raise evt_2",
            "active"
        ]
    );
}

#[test]
fn a_mute_program_gets_one_copy_that_is_settled_unverified() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    assert_eq!(scene.step(0).len(), 1);
    assert_eq!(scene.pipeline.next_deadline(), Some(at(2000)));
    assert!(scene.step(2000).is_empty());
    assert_eq!(scene.log, ["type 1", "verdict timeout_fallback", "settle evt_1"]);
    assert_eq!(scene.pipeline.unsettled_count(), 0);
    assert!(scene.step(60_000).is_empty());
    let answers = [Some("del_1"), Some("del_2")].map(|id| scene.pipeline.on_ack(at(60_000), id, None).0);
    assert_eq!(answers, [AckAnswer::Accepted, AckAnswer::NotFound], "what was settled lately is known");
}

#[test]
fn an_echo_after_the_verdict_raises_the_level() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let typed = scene.step(0);
    scene.step(2000);
    scene.output(6000, &format!("{}\r\n", typed[0]));
    assert_eq!(scene.log, ["type 1", "verdict timeout_fallback", "settle evt_1", "raise evt_1"]);
    scene.step(15_000);
    scene.output(15_001, &format!("{}\r\n", typed[0]));
    assert_eq!(scene.log.len(), 4, "it was shown already");
}

#[test]
fn messages_without_a_verdict_have_watches_before_those_with_one() {
    let messages: Vec<Message> = (1..=100).map(|seq| message(seq, "text")).collect();
    let mut scene = Scene::new("cat", &messages);
    let mut last = None;
    // At the usual pace more than 64 of them are within 15 s of their injection.
    for tick in 0..1000 {
        last = scene.step(tick * 10).pop().or(last);
    }
    let typed = scene.log.iter().filter(|line| *line == "type 1").count();
    assert!(typed > 90, "{typed}");
    scene.output(10_000, &format!("{}\r\n", last.expect("a message")));
    assert_eq!(scene.log.iter().filter(|line| *line == "verdict echo").count(), 1);
}

#[test]
fn a_harness_at_its_prompt_gets_a_second_copy_and_a_busy_one_does_not() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    scene.step(0);
    assert!(scene.step(15_000).is_empty(), "it is not at its prompt");
    assert!(scene.pipeline.watches_screen());
    let rested = ScreenFacts { at_prompt_since: Some(at(15_500)), ..ScreenFacts::default() };
    let shown = ScreenFacts { squashed: "[evt_1]".into(), ..rested.clone() };
    let effects = scene.pipeline.poll(at(16_000), &shown);
    assert!(scene.note(effects).is_empty(), "the screen shows the message");
    let effects = scene.pipeline.poll(at(16_500), &rested);
    assert_eq!(scene.note(effects).len(), 1);
    assert_eq!(scene.log, ["type 1", "type 2"]);
}

#[test]
fn manual_mode_holds_messages_until_they_are_flushed() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    assert_eq!(scene.pipeline.set_mode(DeliveryMode::ManualFlush), (DeliveryMode::AutoInject, 0));
    assert!(scene.step(0).is_empty());
    assert_eq!((scene.pipeline.flush(), scene.pipeline.flush()), (2, 0));
    scene.pipeline.enqueue(message(3, "three"));
    let task = Message { origin: Origin::Task, seq: None, target: "ada".into(), ..message(9, "task") };
    scene.pipeline.enqueue(task);
    let mut typed = Vec::new();
    for now in (0..2000).step_by(100) {
        typed.extend(scene.step(now));
    }
    let bodies: Vec<_> = typed.iter().filter_map(|line| line.rsplit(' ').next()).collect();
    assert_eq!(bodies, ["task", "one", "two"]);
    assert_eq!(scene.pipeline.pending().len(), 1);
    assert_eq!(scene.pipeline.set_mode(DeliveryMode::AutoInject), (DeliveryMode::ManualFlush, 1));
}

#[test]
fn a_flood_holds_an_injection_for_ten_seconds_and_steering_for_none() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let flood = "x".repeat(40 << 10);
    let mut now = 0;
    while now < 9_900 {
        scene.output(now, &flood);
        assert!(scene.step(now).is_empty(), "{now}");
        now += 100;
    }
    scene.output(10_000, &flood);
    assert_eq!(scene.step(10_000).len(), 1);
    scene.pipeline.enqueue(Message { urgency: Urgency::Steer, ..message(2, "now") });
    scene.output(10_200, &flood);
    assert_eq!(scene.step(10_200).len(), 1);
}

#[test]
fn messages_without_an_outcome_outlive_the_process() {
    let mut scene = Scene::new("claude", &[message(1, "one"), message(2, "two"), message(3, "three")]);
    let first = scene.step(0);
    scene.output(10, &format!("{}\r\n> ", first[0]));
    scene.step(200);
    let left = scene.pipeline.end();
    assert_eq!(left.typed.iter().map(|message| message.seq).collect::<Vec<_>>(), [Some(2)]);
    assert_eq!(left.waiting.iter().map(|message| message.seq).collect::<Vec<_>>(), [Some(3)]);
}

#[test]
fn an_echo_before_enter_settles_nothing() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let (key, text) = scene.note(effects).remove(0);
    scene.pipeline.on_began(key, at(0));
    scene.output(10, &format!("{text}\r\n"));
    scene.step(20_000);
    assert_eq!(scene.log, ["type 1"], "Enter is not written");
    let effects = scene.pipeline.on_written(key, at(20_001));
    assert!(
        matches!(effects.first(), Some(Effect::Publish(event)) if matches!(**event, Event::DeliveryInjected { .. }))
    );
    scene.note(effects);
    assert_eq!(scene.log, ["type 1", "verdict echo", "settle evt_1"]);
}

#[test]
fn a_message_whose_enter_was_not_written_outlives_the_process() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let (key, text) = scene.note(effects).remove(0);
    scene.pipeline.on_began(key, at(0));
    scene.output(10, &format!("{text}\r\n"));
    assert_eq!(scene.pipeline.end().typed.len(), 1);
}

#[test]
fn a_read_receipt_confirms_a_message_without_another_signal() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    let first = scene.step(0);
    let effects = scene.pipeline.on_read(at(10), "evt_1");
    scene.note(effects);
    assert_eq!(scene.log, ["type 1", "verdict mcp", "settle evt_1"]);
    let second = scene.step(100);
    scene.output(110, &format!("{}{}", first[0], second[0]));
    let before = scene.log.len();
    // The broker reports echoed messages as read itself.
    let effects = scene.pipeline.on_read(at(120), "evt_2");
    scene.note(effects);
    assert_eq!(scene.log.len(), before);
    assert!(scene.pipeline.on_read(at(120), "evt_9").is_empty());
}

#[test]
fn a_flood_holds_a_message_and_the_time_is_reported() {
    let mut scene = Scene::new("cat", &[]);
    scene.output(0, &"x".repeat(40 << 10));
    scene.pipeline.enqueue(message(1, "one"));
    assert!(scene.step(100).is_empty());
    assert_eq!(scene.step(1500).len(), 1);
    assert_eq!(scene.log, ["held 1400", "type 1"]);
}

#[test]
fn a_suggestion_is_waited_for_and_dismissed() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    let suggested = ScreenFacts { has_suggestion: true, ..ScreenFacts::default() };
    assert!(scene.pipeline.poll(at(0), &suggested).is_empty());
    assert_eq!(scene.pipeline.next_deadline(), Some(at(500)));
    let effects = scene.pipeline.poll(at(10_000), &suggested);
    assert!(matches!(effects.as_slice(), [.., Effect::Type(request)] if request.lead == Lead::Dismiss));
}

/// Types the first message without its end.
fn begin_write(scene: &mut Scene) -> u64 {
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let (key, _) = scene.note(effects).remove(0);
    scene.pipeline.on_began(key, at(0));
    key
}

#[test]
fn a_message_that_fails_while_its_write_stalls_lets_the_next_one_through() {
    let mut scene = Scene::new("claude", &[message(1, "one"), message(2, "two")]);
    let key = begin_write(&mut scene);
    assert!(scene.step(15_000).is_empty());
    assert!(scene.step(16 * 60_000).is_empty(), "the first one is being written");
    assert_eq!(scene.log, ["type 1", "fail 1"]);
    let (answer, _) = scene.pipeline.on_ack(at(16 * 60_000), Some("del_1"), None);
    assert_eq!(answer, AckAnswer::Failed);
    scene.pipeline.on_written(key, at(17 * 60_000));
    assert_eq!(scene.step(17 * 60_000 + 10_000).len(), 1);
}

#[test]
fn a_message_that_is_verified_while_its_second_write_stalls_lets_the_next_one_through() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    scene.step(0);
    assert!(scene.step(15_000).is_empty());
    let rested = ScreenFacts { at_prompt_since: Some(at(15_500)), ..ScreenFacts::default() };
    let effects = scene.pipeline.poll(at(16_500), &rested);
    let (key, _) = scene.note(effects).remove(0);
    scene.pipeline.enqueue(message(2, "two"));
    let (_, effects) = scene.pipeline.on_ack(at(16_600), Some("del_1"), None);
    scene.note(effects);
    assert!(scene.step(120_000).is_empty());
    assert_eq!(scene.pipeline.next_deadline(), None, "nothing but the write is waited for");
    scene.pipeline.on_began(key, at(120_001));
    scene.pipeline.on_written(key, at(120_002));
    assert_eq!(scene.step(130_000).len(), 1);
}

#[test]
fn an_injection_without_room_is_handed_over_again() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let typed = effects.into_iter().find(|effect| matches!(effect, Effect::Type(_)));
    let refused = typed.and_then(|effect| if let Effect::Type(request) = effect { Some(request) } else { None });
    scene.pipeline.on_refused(at(0), refused.expect("a request"));
    assert_eq!(scene.pipeline.next_deadline(), Some(at(1000)));
    assert!(scene.step(999).is_empty());
    assert_eq!(scene.step(1000), ["Relay message from bob in #room [evt_1]: one"]);
    assert_eq!(scene.step(4000), ["Relay message from bob in #room [evt_2]: two"]);
}

fn rested() -> ScreenFacts {
    ScreenFacts { at_prompt_since: Some(at(15_500)), ..ScreenFacts::default() }
}

/// Brings a message to its second copy, which waits behind something else in the terminal's queue.
fn queue_second_copy(scene: &mut Scene) -> u64 {
    scene.step(0);
    assert!(scene.step(15_000).is_empty());
    let effects = scene.pipeline.poll(at(16_500), &rested());
    let (key, _) = scene.note(effects).remove(0);
    // The agent begins to work.
    let effects = scene.pipeline.poll(at(16_600), &ScreenFacts::default());
    scene.note(effects);
    assert_eq!(scene.log, ["type 1", "type 2", "withdraw"]);
    assert!(scene.step(16_700).is_empty());
    assert_eq!(scene.log.len(), 3, "it is called back once");
    key
}

#[test]
fn a_copy_that_was_called_back_is_typed_when_the_agent_rests_again() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    let key = queue_second_copy(&mut scene);
    scene.pipeline.on_withdrawn(key, at(16_700));
    assert_eq!(scene.pipeline.next_deadline(), Some(at(16_700)));
    assert!(scene.step(16_700).is_empty());
    let effects = scene.pipeline.poll(at(20_000), &rested());
    assert_eq!(scene.note(effects).len(), 1);
    assert_eq!(scene.log, ["type 1", "type 2", "withdraw", "type 2"]);
}

#[test]
fn a_copy_that_could_not_be_called_back_is_an_attempt() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    let key = queue_second_copy(&mut scene);
    scene.pipeline.on_began(key, at(17_000));
    let attempts: Vec<u32> = scene.pipeline.unsettled().map(|(_, attempts)| attempts).collect();
    assert_eq!(attempts, [2]);
    scene.pipeline.on_written(key, at(17_000));
    scene.output(17_100, "Relay message from bob in #room [evt_1]: one\r\n");
    assert_eq!(scene.log[3..], ["verdict echo", "settle evt_1"]);
}

#[test]
fn the_end_of_a_write_may_be_known_before_its_beginning() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    let key = queue_second_copy(&mut scene);
    scene.pipeline.on_written(key, at(17_000));
    scene.pipeline.on_began(key, at(17_000));
    assert!(scene.step(32_000).is_empty(), "the agent works");
    let effects = scene.pipeline.poll(at(33_000), &rested());
    assert_eq!(scene.note(effects).len(), 1);
    assert_eq!(scene.log[3..], ["type 3"]);
}

fn request(effects: Vec<Effect>) -> TypeRequest {
    let typed = |effect| if let Effect::Type(request) = effect { Some(request) } else { None };
    effects.into_iter().find_map(typed).expect("a request")
}

#[test]
fn an_injection_that_the_terminal_fails_to_write_is_handed_over_again() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    let first = request(scene.pipeline.poll(at(0), &ScreenFacts::default()));
    scene.pipeline.on_write_failed(at(0), first);
    assert_eq!(scene.pipeline.next_deadline(), Some(at(1000)));
    let again = request(scene.pipeline.poll(at(1000), &ScreenFacts::default()));
    assert_eq!((again.attempt, again.text.as_str()), (1, "Relay message from bob in #room [evt_1]: one"));
    scene.pipeline.on_began(again.key, at(1000));
    scene.pipeline.on_write_failed(at(1000), again);
    assert!(scene.step(1999).is_empty());
    assert_eq!(scene.step(2000), ["Relay message from bob in #room [evt_1]: one"]);
    assert_eq!(scene.step(10_000), ["Relay message from bob in #room [evt_2]: two"]);
    assert_eq!(scene.log, ["type 1", "verdict timeout_fallback", "settle evt_1", "type 1"]);
}

/// Types a part of the first message, which the terminal then fails to write.
fn fail_write(scene: &mut Scene) {
    let first = request(scene.pipeline.poll(at(0), &ScreenFacts::default()));
    scene.pipeline.on_began(first.key, at(0));
    scene.pipeline.on_write_failed(at(10), first);
}

#[test]
fn a_signal_for_a_message_whose_write_failed_counts_once_it_is_written() {
    let echo = |scene: &mut Scene| scene.output(20, "Relay message from bob in #room [evt_1]: one\r\n");
    let ack = |scene: &mut Scene| {
        let (answer, effects) = scene.pipeline.on_ack(at(20), Some("del_1"), None);
        assert_eq!(answer, AckAnswer::Accepted);
        scene.note(effects);
    };
    for (signal, verdict) in [(&echo as &dyn Fn(&mut Scene), "verdict echo"), (&ack, "verdict mcp")] {
        let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
        fail_write(&mut scene);
        signal(&mut scene);
        assert!(scene.step(30).is_empty());
        assert_eq!(scene.log, [""; 0], "Enter is not written");
        assert_eq!(scene.step(1010), ["Relay message from bob in #room [evt_1]: one"]);
        assert_eq!(scene.log, ["type 1", verdict, "settle evt_1"]);
        assert_eq!(scene.step(10_000), ["Relay message from bob in #room [evt_2]: two"]);
    }
}

#[test]
fn texts_are_kept_up_to_their_verdict_and_have_a_bound() {
    let body = "x".repeat(256 << 10);
    let messages: Vec<Message> = (1..=50).map(|seq| message(seq, &body)).collect();
    let mut scene = Scene::new("cat", &messages);
    scene.pipeline.profile.usable = RequiredChannels { mcp: true, ..RequiredChannels::NONE };
    scene.pipeline.profile.strategy.silent = relay_verification::delivery::UnverifiedPolicy::Strict;
    let held =
        |scene: &Scene| scene.pipeline.outstanding.iter().map(super::outstanding::OutstandingMessage::text_bytes).sum();
    let mut now = 0;
    let mut typed = 0;
    while now < 200_000 {
        typed += scene.step(now).len();
        now += 2100;
    }
    // Each takes three times its body.
    assert_eq!(typed, 43, "the next one waits");
    let bytes: usize = held(&scene);
    assert!(((32 << 20)..(33 << 20)).contains(&bytes), "{bytes}");
    for seq in 1..=43 {
        let (answer, effects) = scene.pipeline.on_ack(at(now), Some(&format!("del_{seq}")), None);
        assert_eq!(answer, AckAnswer::Accepted);
        for effect in &effects {
            if let Effect::Settle(settlement) = effect {
                assert!(settlement.message.body.is_empty());
            }
        }
        scene.note(effects);
    }
    assert_eq!((held(&scene), scene.pipeline.outstanding.len()), (0, 43));
    assert_eq!(scene.step(now).len(), 1);
}

#[test]
fn a_question_holds_messages_up_to_the_first_verdict() {
    let gated = ScreenFacts { is_gated: true, ..ScreenFacts::default() };
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    assert!(scene.pipeline.watches_gates() && !scene.pipeline.has_typed());
    assert!(scene.pipeline.poll(at(0), &gated).is_empty());
    let first = scene.step(100);
    assert!(scene.pipeline.watches_gates() && scene.pipeline.has_typed());
    assert!(scene.pipeline.poll(at(300), &gated).is_empty());
    scene.output(400, &format!("{}\r\n", first[0]));
    assert!(!scene.pipeline.watches_gates(), "a message may quote the question from here on");
    assert_eq!(scene.step(400).len(), 1);
}
