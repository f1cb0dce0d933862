use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{Channel, RequiredChannels, Timestamp};

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

#[test]
fn the_pause_grows_with_failures_and_shrinks_with_rows() {
    let mut pause = Pause::default();
    let mut steps = Vec::new();
    for _ in 0..7 {
        steps.push(pause.duration().as_millis());
        pause.attempt_failed();
    }
    assert_eq!(steps, [100, 200, 500, 1000, 2000, 5000, 5000]);
    for _ in 0..2 {
        pause.verified();
    }
    pause.unverified();
    pause.verified();
    assert_eq!(pause.duration().as_millis(), 5000, "the row was broken");
    pause.verified();
    pause.verified();
    assert_eq!(pause.duration().as_millis(), 2500);
    for _ in 0..60 {
        pause.verified();
    }
    assert_eq!(pause.duration().as_millis(), 10);
    pause.attempt_failed();
    assert_eq!(pause.duration().as_millis(), 100);
}

#[test]
fn the_next_injection_waits_for_pause_verdict_and_room() {
    let mut gate = InjectionGate::new();
    assert_eq!(gate.next_start(at(0), 0, true), InjectionStart::Now);
    gate.started(at(0));
    assert_eq!(gate.next_start(at(10), 1, true), InjectionStart::AfterEnter);
    gate.on_entered(at(50));
    assert_eq!(gate.next_start(at(60), 1, false), InjectionStart::At(at(150)));
    assert_eq!(gate.next_start(at(150), 1, false), InjectionStart::Now);
    assert_eq!(gate.next_start(at(60), 1, true), InjectionStart::At(at(2000)));
    assert_eq!(gate.next_start(at(2000), 1, true), InjectionStart::Now);
    gate.on_verdict();
    assert_eq!(gate.next_start(at(60), 0, true), InjectionStart::At(at(150)));
    assert_eq!(gate.next_start(at(9000), MAX_OUTSTANDING, true), InjectionStart::AfterVerdict);
}

#[test]
fn a_flood_holds_injections_until_the_agent_is_calm() {
    let mut hold = OutputHold::new();
    hold.on_output(at(0), 32 * 1024);
    assert!(!hold.is_held(at(0)), "exactly the threshold");
    hold.on_output(at(100), 1);
    assert!(hold.is_held(at(100)));
    assert_eq!(hold.bytes_per_second(at(999)), 32 * 1024 + 1);
    // Calm from 1000, released 250 ms later.
    assert_eq!(hold.opens_at(at(100), at(100), HoldRule::Wait), Some(at(1250)));
    assert_eq!(hold.opens_at(at(100), at(100), HoldRule::Skip), None);
    hold.on_output(at(1100), 100);
    assert!(hold.is_held(at(1249)));
    assert!(!hold.is_held(at(1250)));
    hold.on_output(at(1300), 5000);
    assert!(!hold.is_held(at(1300)), "between the thresholds nothing changes");
}

#[test]
fn output_between_the_thresholds_keeps_the_hold_up_to_its_limit() {
    let mut hold = OutputHold::new();
    hold.on_output(at(0), 40_000);
    for millis in (200..30_000).step_by(200) {
        hold.on_output(at(millis), 1000);
        assert!(hold.is_held(at(millis)));
        let opens_at = hold.opens_at(at(millis), at(400), HoldRule::Wait);
        assert_eq!(opens_at.is_none(), millis >= 10_400, "{millis}");
    }
}

#[test]
fn agents_that_mostly_flood_have_another_primary_channel() {
    let mut hold = OutputHold::new();
    hold.injected(at(0));
    hold.on_output(at(1), 40_000);
    hold.injected(at(2));
    let none = RequiredChannels::NONE;
    assert_eq!(hold.primary_channel(Channel::Echo, none), Channel::Echo, "half is not most");
    hold.injected(at(3));
    assert_eq!(hold.primary_channel(Channel::Echo, none), Channel::File);
    assert_eq!(hold.primary_channel(Channel::Echo, RequiredChannels { mcp: true, ..none }), Channel::Mcp);
}

proptest! {
    #[test]
    fn the_rate_is_the_sum_of_the_last_second(reads in prop::collection::vec((0i64..400, 0u64..10_000), 0..60)) {
        let mut rate = OutputRate::new();
        let mut all = Vec::new();
        let mut now = 0;
        for (pause, bytes) in reads {
            now += pause;
            all.push((now, bytes));
            rate.record(at(now), bytes);
            let expected: u64 = all.iter().filter(|(read, _)| now < read + 1000).map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(rate.bytes_per_second(at(now)), expected);
        }
    }

    #[test]
    fn no_injection_is_held_for_longer_than_the_limit(reads in prop::collection::vec((0i64..400, 0usize..100_000), 0..60)) {
        let mut hold = OutputHold::new();
        let mut now = 0;
        for (pause, bytes) in reads {
            now += pause;
            hold.on_output(at(now), bytes);
            if let Some(opens_at) = hold.opens_at(at(now), at(now), HoldRule::Wait) {
                prop_assert!(opens_at > at(now) && opens_at <= at(now) + HOLD_LIMIT);
            }
            prop_assert!(hold.opens_at(at(now) + HOLD_LIMIT, at(now), HoldRule::Wait).is_none());
            prop_assert!(!hold.is_held(at(now) + Duration::from_millis(1250)), "calm after the last output");
        }
    }
}
