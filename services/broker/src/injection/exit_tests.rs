//! A pipeline whose agent has asked for its end.

use super::{
    DeliveryMode, Effect, ScreenFacts, TypeRequest,
    tests::{Scene, at, message},
};
use crate::mailbox::{Message, Origin};

#[test]
fn nothing_is_typed_after_the_request_and_verdicts_go_on() {
    let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "two")]);
    let first = scene.step(0);
    scene.pipeline.close();
    assert!(scene.pipeline.awaits_verdict());
    scene.output(60, &format!("{}\r\n", first[0]));
    assert_eq!(scene.log, ["type 1", "verdict echo", "settle evt_1"]);
    assert!(!scene.pipeline.awaits_verdict());
    // Neither a message that waits nor one that comes, in any mode.
    scene.pipeline.enqueue(message(3, "three"));
    assert!(scene.step(1000).is_empty());
    scene.pipeline.set_mode(DeliveryMode::ManualFlush);
    assert_eq!(scene.pipeline.flush(), 2);
    assert!(scene.step(60_000).is_empty());
    assert_eq!((scene.pipeline.pending().len(), scene.pipeline.typing_since()), (2, None));
    let left = scene.pipeline.end();
    let waiting: Vec<_> = left.waiting.iter().map(|message| message.event_id.as_str()).collect();
    assert!(left.typed.is_empty());
    assert_eq!(waiting, ["evt_2", "evt_3"]);
}

#[test]
fn an_injection_that_has_not_begun_is_called_back_and_its_message_is_left() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let typed = scene.note(effects);
    scene.pipeline.close();
    assert!(scene.pipeline.awaits_verdict(), "it may have begun");
    let effects = scene.pipeline.poll(at(10), &ScreenFacts::default());
    assert!(matches!(effects[..], [Effect::Withdraw(key)] if key == typed[0].0), "{effects:?}");
    scene.pipeline.on_withdrawn(typed[0].0, at(10));
    assert!(!scene.pipeline.awaits_verdict());
    assert_eq!(scene.pipeline.end().typed[0].event_id, "evt_1");
}

#[test]
fn no_second_copy_is_typed_or_waited_for() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    assert_eq!(scene.step(0).len(), 1);
    scene.pipeline.close();
    let rested = ScreenFacts { at_prompt_since: Some(at(0)), ..ScreenFacts::default() };
    let effects = scene.pipeline.poll(at(20_000), &rested);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Type(_))), "{effects:?}");
    assert!(!scene.pipeline.awaits_verdict());
    assert_eq!(scene.pipeline.end().typed[0].event_id, "evt_1");
}

#[test]
fn neither_a_failed_message_that_is_handed_over_again_nor_one_of_the_broker_is_typed() {
    for origin in [Origin::Redelivered, Origin::ActionResult, Origin::Task, Origin::Continuity] {
        let mut scene = Scene::new("cat", &[]);
        scene.pipeline.close();
        scene.pipeline.enqueue(Message { origin, seq: None, ..message(1, "one") });
        assert!(scene.step(0).is_empty() && scene.step(60_000).is_empty(), "{origin:?}");
        assert_eq!(scene.pipeline.typing_since(), None, "{origin:?} waits to be typed");
        assert!(!scene.pipeline.awaits_verdict() && !scene.pipeline.has_typed());
        assert_eq!(scene.pipeline.end().waiting[0].event_id, "evt_1");
    }
}

#[test]
fn a_question_in_front_of_a_second_copy_is_not_looked_for() {
    let mut scene = Scene::new("claude", &[message(1, "one")]);
    assert_eq!(scene.step(0).len(), 1);
    assert!(scene.step(15_000).is_empty());
    let gated = ScreenFacts { at_prompt_since: Some(at(15_500)), is_gated: true, ..ScreenFacts::default() };
    let effects = scene.pipeline.poll(at(16_500), &gated);
    assert!(scene.note(effects).is_empty());
    assert!(scene.pipeline.watches_gates(), "the copy waits for an answer");
    scene.pipeline.close();
    assert!(!scene.pipeline.watches_gates());
}

/// Takes the injection of the first message, without writing it.
fn first_request(scene: &mut Scene) -> TypeRequest {
    let effects = scene.pipeline.poll(at(0), &ScreenFacts::default());
    let typed = |effect| if let Effect::Type(request) = effect { Some(request) } else { None };
    effects.into_iter().find_map(typed).expect("a request")
}

#[test]
fn a_write_that_fails_is_not_repeated_and_its_message_is_left() {
    for is_called_back in [false, true] {
        let mut scene = Scene::new("cat", &[message(1, "one")]);
        let request = first_request(&mut scene);
        scene.pipeline.close();
        if is_called_back {
            // It begins before the terminal can give it back.
            assert!(scene.step(10).is_empty());
            assert_eq!(scene.log, ["withdraw"]);
        }
        scene.pipeline.on_began(request.key, at(20));
        scene.pipeline.on_write_failed(at(30), request);
        assert!(!scene.pipeline.awaits_verdict(), "its Enter does not come");
        for now in [30, 1030, 2030, 29_000] {
            assert!(scene.step(now).is_empty(), "it is typed after {now} ms");
        }
        assert!(!scene.log.iter().any(|line| line.starts_with("settle")), "{:?}", scene.log);
        assert_eq!(scene.pipeline.end().typed[0].event_id, "evt_1");
    }
}

#[test]
fn an_injection_without_room_is_not_handed_over_again_and_its_message_is_left() {
    let mut scene = Scene::new("cat", &[message(1, "one")]);
    let request = first_request(&mut scene);
    scene.pipeline.on_refused(at(0), request);
    scene.pipeline.close();
    assert!(scene.step(1000).is_empty() && scene.step(60_000).is_empty());
    assert!(!scene.pipeline.awaits_verdict());
    assert_eq!((scene.log.len(), scene.pipeline.next_deadline()), (0, None), "{:?}", scene.log);
    assert_eq!(scene.pipeline.end().typed[0].event_id, "evt_1");
}
