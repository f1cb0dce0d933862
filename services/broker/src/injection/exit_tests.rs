//! A pipeline whose agent has asked for its end.

use super::{
    DeliveryMode, Effect, ScreenFacts,
    tests::{Scene, at, message},
};

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
