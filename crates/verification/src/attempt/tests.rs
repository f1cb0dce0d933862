use proptest::prelude::*;

use super::AttemptEffect::{Acknowledge, Ignore, TimeOut, Upgrade};
use super::*;

const ECHO_REQUIRED: RequiredChannels = RequiredChannels { echo: true, file: true, mcp: false, api: false };

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

fn proof(millis: u64, channel: Channel) -> Proof {
    Proof { channel, elapsed: Duration::from_millis(millis) }
}

fn attempt(required: RequiredChannels) -> Attempt {
    Attempt::new(AttemptRules { required, echo_window: SIGNAL_WINDOW }, at(0))
}

#[test]
fn the_first_signal_acknowledges_and_stronger_ones_upgrade() {
    let mut attempt = attempt(ECHO_REQUIRED);
    assert_eq!(attempt.signal(at(80), Channel::Activity), [Ignore(IgnoredSignal::ActivityBeforeAck)]);
    assert_eq!(attempt.signal(at(90), Channel::Echo), [Acknowledge(proof(90, Channel::Echo))]);
    assert_eq!(attempt.signal(at(95), Channel::Echo), []);
    assert_eq!(attempt.signal(at(100), Channel::Mcp), [Upgrade(proof(100, Channel::Mcp))]);
    assert_eq!(attempt.signal(at(110), Channel::File), []);
    assert_eq!(attempt.signal(at(14_999), Channel::Activity), [Upgrade(proof(14_999, Channel::Activity))]);
    assert_eq!(attempt.tick(at(20_000)), None);
    assert_eq!(attempt.level(), Level::Active);
}

#[test]
fn signals_outside_the_window_are_ignored() {
    let mut attempt = attempt(ECHO_REQUIRED);
    assert_eq!(attempt.signal(at(-1), Channel::File), [Ignore(IgnoredSignal::BeforeInjection)]);
    assert_eq!(attempt.tick(at(14_999)), None);
    assert_eq!(attempt.signal(at(15_000), Channel::File), [TimeOut, Ignore(IgnoredSignal::AfterWindow)]);
    assert_eq!(attempt.level(), Level::Injected);
    assert_eq!(attempt.tick(at(15_001)), None);
}

#[test]
fn without_required_channels_it_ends_two_seconds_after_enter() {
    let mut attempt = attempt(RequiredChannels::NONE);
    assert_eq!(attempt.tick(at(60_000)), None, "Enter was not written");
    attempt.enter_written(at(500));
    assert_eq!(attempt.tick(at(2499)), None);
    assert_eq!(attempt.tick(at(2500)), Some(TimeOut));
    assert_eq!(attempt.signal(at(2600), Channel::Activity), [Ignore(IgnoredSignal::ActivityBeforeAck)]);
    assert_eq!(attempt.signal(at(9000), Channel::Echo), [Upgrade(proof(9000, Channel::Echo))]);
    assert_eq!(attempt.signal(at(15_000), Channel::File), [Ignore(IgnoredSignal::AfterWindow)]);
    assert_eq!(attempt.level(), Level::Echoed);
}

#[test]
fn a_flood_extends_the_echo_once() {
    let mut flooded = attempt(ECHO_REQUIRED);
    assert!(flooded.extend_echo(at(100)));
    assert!(!flooded.extend_echo(at(200)));
    assert_eq!(flooded.times_out_at(), Some(at(20_000)));
    assert_eq!(flooded.signal(at(15_500), Channel::File), [Ignore(IgnoredSignal::AfterWindow)]);
    assert_eq!(flooded.signal(at(19_999), Channel::Echo), [Acknowledge(proof(19_999, Channel::Echo))]);

    let mut program = attempt(RequiredChannels::NONE);
    program.enter_written(at(10));
    assert!(program.extend_echo(at(20)));
    assert_eq!(program.times_out_at(), Some(at(7010)));

    let mut over = attempt(ECHO_REQUIRED);
    assert!(!over.extend_echo(at(15_000)));
}

#[test]
fn a_short_echo_window_leaves_the_other_channels_alone() {
    let rules = AttemptRules { required: ECHO_REQUIRED, echo_window: Duration::from_secs(5) };
    let mut attempt = Attempt::new(rules, at(0));
    assert_eq!(attempt.signal(at(5000), Channel::Echo), [Ignore(IgnoredSignal::AfterWindow)]);
    assert_eq!(attempt.times_out_at(), Some(at(15_000)));
    assert_eq!(attempt.signal(at(14_000), Channel::File), [Acknowledge(proof(14_000, Channel::File))]);
}

#[test]
fn an_attempt_lasts_its_time_although_its_end_was_read_before_its_beginning() {
    let rules = AttemptRules { required: RequiredChannels::NONE, echo_window: SIGNAL_WINDOW };
    let mut attempt = Attempt::new(rules, at(10));
    attempt.enter_written(at(9));
    assert_eq!(attempt.times_out_at(), Some(at(2010)));
}

fn any_channel() -> impl Strategy<Value = Channel> {
    prop::sample::select(vec![Channel::Echo, Channel::File, Channel::Mcp, Channel::Api, Channel::Activity])
}

proptest! {
    #[test]
    fn levels_only_rise_and_there_is_one_verdict(
        is_required in any::<bool>(),
        entered_at in 0i64..20_000,
        // In any order of time: signals may be reordered.
        steps in prop::collection::vec((-1000i64..25_000, prop::option::of(any_channel())), 0..40),
    ) {
        let mut attempt = attempt(if is_required { ECHO_REQUIRED } else { RequiredChannels::NONE });
        attempt.enter_written(at(entered_at));
        let mut level = Level::Injected;
        let mut verdicts = 0;
        for (millis, channel) in steps {
            let effects = match channel {
                Some(channel) => attempt.signal(at(millis), channel),
                None => attempt.tick(at(millis)).into_iter().collect(),
            };
            for effect in effects {
                match effect {
                    Acknowledge(proof) => {
                        verdicts += 1;
                        prop_assert!(proof.channel.acknowledges());
                        prop_assert!(proof.level() > level);
                    }
                    TimeOut => verdicts += 1,
                    Upgrade(proof) => {
                        prop_assert!(verdicts == 1);
                        prop_assert!(proof.level() > level);
                    }
                    Ignore(_) => {}
                }
            }
            prop_assert!(attempt.level() >= level);
            level = attempt.level();
        }
        prop_assert!(verdicts <= 1);
    }
}
