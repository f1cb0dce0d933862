use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::attempt::{AttemptRules, IgnoredSignal};
use crate::channel::SIGNAL_WINDOW;
use crate::strategy::{Learned, Strategy as AgentStrategy};
use crate::{Channel, Level, Proof, RequiredChannels, Timestamp};

const USABLE: RequiredChannels = RequiredChannels { echo: true, file: true, mcp: true, api: true };

/// The agent works: nothing may be typed again, nothing is settled.
const BUSY: AgentCondition = AgentCondition {
    is_echo_reliable: true,
    at_prompt_since: None,
    is_output_held: false,
    is_message_visible: false,
    is_write_stalled: false,
};

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

fn resting_since(millis: i64) -> AgentCondition {
    AgentCondition { at_prompt_since: Some(at(millis)), ..BUSY }
}

fn rules(harness: &str) -> DeliveryRules {
    AgentStrategy::builtin(harness).rules(USABLE, &Learned::new(), Level::Echoed)
}

/// A delivery whose first attempt began at 0 and wrote Enter at 100.
fn injected(rules: DeliveryRules) -> Delivery {
    let mut delivery = Delivery::new(rules);
    inject(&mut delivery, 0);
    delivery
}

fn inject(delivery: &mut Delivery, millis: i64) {
    assert!(delivery.begin_attempt(at(millis)));
    delivery.enter_written(at(millis + 100));
}

fn verified(millis: u64, channel: Channel, attempt: u32) -> DeliveryEffect {
    DeliveryEffect::Verified { proof: proof(millis, channel), attempt }
}

fn proof(millis: u64, channel: Channel) -> Proof {
    Proof { channel, elapsed: Duration::from_millis(millis) }
}

fn closed(reason: UnverifiedReason) -> DeliveryEffect {
    DeliveryEffect::Closed { reason, proof: None }
}

const FAILED: DeliveryEffect = DeliveryEffect::Failed(FailureReason::VerificationFailed);

#[test]
fn a_signal_verifies_and_a_stronger_one_upgrades() {
    let mut delivery = injected(rules("claude"));
    assert_eq!(delivery.next_deadline(), Some(at(15_000)));
    assert_eq!(delivery.signal(at(90), Channel::Echo), [verified(90, Channel::Echo, 1)]);
    let upgraded = DeliveryEffect::Upgraded { proof: proof(200, Channel::Activity), attempt: 1 };
    assert_eq!(delivery.signal(at(200), Channel::Activity), [upgraded]);
    assert_eq!(delivery.signal(at(300), Channel::File), [], "absorbed");
    assert_eq!(delivery.tick(at(20_000), &BUSY), []);
    assert_eq!((delivery.level(), delivery.agent_ended()), (Level::Active, None));
}

#[test]
fn silence_is_answered_with_three_reinjections_and_a_failure() {
    let mut delivery = injected(rules("claude"));
    for attempt in 2..=4 {
        let now = i64::from(attempt - 1) * 15_000;
        assert_eq!(delivery.tick(at(now - 1), &resting_since(0)), []);
        assert_eq!(delivery.tick(at(now), &resting_since(0)), [DeliveryEffect::Reinject { attempt }]);
        inject(&mut delivery, now);
    }
    assert_eq!(delivery.tick(at(60_000), &resting_since(0)), [FAILED]);
    assert_eq!(delivery.tick(at(75_000), &resting_since(0)), []);
    let ignored = DeliveryEffect::Ignored { channel: Channel::File, reason: IgnoredSignal::AfterFailure };
    assert_eq!(delivery.signal(at(76_000), Channel::File), [ignored]);
    assert!(!delivery.begin_attempt(at(80_000)));
}

#[test]
fn a_signal_counts_for_the_running_attempt() {
    let mut delivery = injected(rules("claude"));
    delivery.tick(at(15_000), &resting_since(0));
    inject(&mut delivery, 15_000);
    assert_eq!(delivery.signal(at(15_200), Channel::Mcp), [verified(200, Channel::Mcp, 2)]);
}

#[test]
fn a_signal_before_a_due_reinjection_makes_it_needless() {
    let mut delivery = injected(rules("claude"));
    delivery.tick(at(15_000), &resting_since(0));
    assert_eq!(delivery.signal(at(15_010), Channel::File), [verified(15_010, Channel::File, 1)]);
    assert!(!delivery.begin_attempt(at(15_020)));
}

#[test]
fn each_condition_prevents_a_reinjection() {
    let rest = resting_since(0);
    for condition in [
        AgentCondition { is_echo_reliable: false, ..rest },
        AgentCondition { at_prompt_since: None, ..rest },
        AgentCondition { is_output_held: true, ..rest },
        AgentCondition { is_message_visible: true, ..rest },
        AgentCondition { is_write_stalled: true, ..rest },
    ] {
        assert!(!condition.allows_reinjection());
        let condition = AgentCondition { at_prompt_since: condition.at_prompt_since.map(|_| at(14_000)), ..condition };
        let mut delivery = injected(rules("aider"));
        assert_eq!(delivery.tick(at(15_000), &condition), [DeliveryEffect::Held]);
        let later = resting_since(16_000);
        assert_eq!(delivery.tick(at(16_000), &later), [DeliveryEffect::Reinject { attempt: 2 }], "{condition:?}");
        assert_eq!(delivery.tick(at(16_100), &condition), [DeliveryEffect::Held], "no longer");
        assert_eq!(delivery.tick(at(16_200), &later), [DeliveryEffect::Reinject { attempt: 2 }]);
        inject(&mut delivery, 16_300);
    }
}

#[test]
fn a_program_without_channels_is_closed_two_seconds_after_enter() {
    let mut delivery = injected(rules("cat"));
    assert_eq!(delivery.next_deadline(), Some(at(2100)));
    assert_eq!(delivery.tick(at(2099), &BUSY), []);
    assert_eq!(delivery.tick(at(2100), &resting_since(0)), [closed(UnverifiedReason::NoChannel)]);
    let upgraded = DeliveryEffect::Upgraded { proof: proof(6000, Channel::Echo), attempt: 1 };
    assert_eq!(delivery.signal(at(6000), Channel::Echo), [upgraded]);
    assert_eq!(delivery.state(), DeliveryState::Closed);
}

#[test]
fn a_settled_delivery_is_closed_when_the_agent_rests() {
    let mut delivery = injected(rules("codex"));
    assert_eq!(delivery.tick(at(15_000), &BUSY), [DeliveryEffect::Held]);
    assert_eq!(delivery.tick(at(39_999), &resting_since(30_000)), []);
    assert_eq!(delivery.tick(at(40_000), &resting_since(30_000)), [closed(UnverifiedReason::SettledIdle)]);

    let mut rested = injected(rules("codex"));
    let effects = rested.tick(at(15_000), &resting_since(-60_000));
    assert_eq!(effects, [closed(UnverifiedReason::SettledIdle)], "it has rested for 10 s since the write");

    let mut unwritten = Delivery::new(rules("codex"));
    assert!(unwritten.begin_attempt(at(0)));
    assert_eq!(unwritten.tick(at(15_000), &resting_since(0)), [DeliveryEffect::Held], "Enter was not written");
}

#[test]
fn a_late_ack_closes_an_unverified_delivery() {
    let mut delivery = injected(rules("codex"));
    delivery.tick(at(15_000), &BUSY);
    let ignored = DeliveryEffect::Ignored { channel: Channel::Echo, reason: IgnoredSignal::AfterWindow };
    assert_eq!(delivery.signal(at(16_000), Channel::Echo), [ignored], "an echo is not enough");
    let late = DeliveryEffect::Closed { reason: UnverifiedReason::Late, proof: Some(proof(60_000, Channel::File)) };
    assert_eq!(delivery.signal(at(60_000), Channel::File), [late]);
    assert_eq!(delivery.level(), Level::InContext);
}

#[test]
fn an_unverified_delivery_fails_after_fifteen_minutes() {
    let limit = 15_000 + 15 * 60_000;
    for (rules, condition) in [
        (rules("codex"), BUSY),
        (rules("claude"), BUSY),
        (DeliveryRules { policy: UnverifiedPolicy::Strict, ..rules("codex") }, resting_since(0)),
        (DeliveryRules { policy: UnverifiedPolicy::Strict, ..rules("claude") }, BUSY),
    ] {
        let mut delivery = injected(rules);
        assert_eq!(delivery.tick(at(15_000), &condition), [DeliveryEffect::Held], "{rules:?}");
        assert_eq!(delivery.next_deadline(), Some(at(limit)));
        assert_eq!(delivery.tick(at(limit - 1), &condition), []);
        assert_eq!(delivery.tick(at(limit), &condition), [FAILED]);
    }
}

#[test]
fn a_strict_delivery_is_closed_by_any_ack() {
    let mut delivery = injected(DeliveryRules { policy: UnverifiedPolicy::Strict, ..rules("codex") });
    delivery.tick(at(15_000), &BUSY);
    let late = DeliveryEffect::Closed { reason: UnverifiedReason::Late, proof: Some(proof(16_000, Channel::Echo)) };
    assert_eq!(delivery.signal(at(16_000), Channel::Echo), [late]);
}

#[test]
fn silence_of_a_headless_agent_is_a_failure() {
    let rules = AgentStrategy::HEADLESS.rules(USABLE, &Learned::new(), Level::Echoed);
    let mut delivery = injected(rules);
    assert_eq!(delivery.tick(at(15_000), &BUSY), [FAILED]);
    let mut answered = injected(rules);
    assert_eq!(answered.signal(at(500), Channel::Api), [verified(500, Channel::Api, 1)]);
}

#[test]
fn a_message_may_demand_level_two() {
    let rules = DeliveryRules { minimum: Level::InContext, ..rules("claude") };
    let mut delivery = injected(rules);
    assert_eq!(delivery.signal(at(90), Channel::Echo), []);
    assert_eq!(delivery.signal(at(95), Channel::Activity), [], "activity does not acknowledge");
    assert_eq!(delivery.signal(at(900), Channel::File), [verified(900, Channel::File, 1)]);
    assert_eq!(delivery.level(), Level::Active);

    let mut echoed = injected(rules);
    echoed.signal(at(90), Channel::Echo);
    assert_eq!(echoed.next_deadline(), Some(at(15_000)));
    assert_eq!(echoed.tick(at(15_000), &resting_since(0)), [FAILED], "it arrived, so it is not typed again");

    let mut never_repeated = injected(DeliveryRules { max_reinjections: 0, ..rules });
    assert_eq!(never_repeated.tick(at(15_000), &BUSY), [FAILED]);
    let mut program = injected(DeliveryRules { minimum: Level::InContext, ..self::rules("cat") });
    assert_eq!(program.tick(at(2100), &BUSY), [FAILED]);
}

#[test]
fn a_flood_extends_the_echo_once_per_delivery() {
    let mut delivery = injected(rules("claude"));
    assert_eq!(delivery.extend_echo(at(50)), Some(at(20_000)));
    assert_eq!(delivery.extend_echo(at(60)), None);
    assert_eq!(delivery.tick(at(19_999), &resting_since(0)), []);
    assert_eq!(delivery.tick(at(20_000), &resting_since(0)), [DeliveryEffect::Reinject { attempt: 2 }]);
    assert_eq!(delivery.extend_echo(at(20_000)), None);
    inject(&mut delivery, 20_000);
    assert_eq!(delivery.extend_echo(at(20_001)), None);
}

#[test]
fn the_end_of_the_agent_cancels_deliveries_without_an_outcome() {
    for prepare in [|_: &mut Delivery| {}, |delivery: &mut Delivery| inject(delivery, 0)] {
        let mut delivery = Delivery::new(rules("claude"));
        prepare(&mut delivery);
        assert_eq!(delivery.agent_ended(), Some(DeliveryEffect::Cancelled));
        assert_eq!(delivery.agent_ended(), None);
        let ignored = DeliveryEffect::Ignored { channel: Channel::Mcp, reason: IgnoredSignal::AfterAgentEnded };
        assert_eq!(delivery.signal(at(1), Channel::Mcp), [ignored]);
        assert!(!delivery.begin_attempt(at(2)));
    }
}

#[test]
fn a_terminal_that_takes_no_input_is_the_reason_of_a_failure() {
    let mut delivery = Delivery::new(rules("claude"));
    assert!(delivery.begin_attempt(at(0)));
    let stalled = AgentCondition { is_write_stalled: true, ..BUSY };
    assert_eq!(delivery.tick(at(15_000), &stalled), [DeliveryEffect::Held]);
    let failed = DeliveryEffect::Failed(FailureReason::WriteStalled);
    assert_eq!(delivery.tick(at(915_000), &stalled), [failed]);
}

#[test]
fn a_message_that_is_still_being_written_is_not_typed_again() {
    let mut delivery = Delivery::new(rules("claude"));
    assert!(delivery.begin_attempt(at(0)));
    assert_eq!(delivery.tick(at(15_000), &resting_since(0)), [DeliveryEffect::Held]);
    delivery.enter_written(at(16_000));
    assert_eq!(delivery.tick(at(16_000), &resting_since(0)), [DeliveryEffect::Reinject { attempt: 2 }]);

    let mut written = Delivery::new(DeliveryRules { policy: UnverifiedPolicy::Written, ..rules("codex") });
    assert!(written.begin_attempt(at(0)));
    assert_eq!(written.tick(at(15_000), &BUSY), [DeliveryEffect::Held], "no ack before Enter");
    written.enter_written(at(16_000));
    assert_eq!(written.tick(at(16_000), &BUSY), [closed(UnverifiedReason::NoChannel)]);
}

#[test]
fn a_signal_ends_an_attempt_whose_time_is_over() {
    let mut delivery = injected(rules("codex"));
    let late = DeliveryEffect::Closed { reason: UnverifiedReason::Late, proof: Some(proof(15_000, Channel::File)) };
    assert_eq!(delivery.signal(at(15_000), Channel::File), [DeliveryEffect::Held, late]);
}

#[derive(Debug, Clone)]
enum Step {
    Begin,
    Enter,
    Signal(Channel),
    Tick(AgentCondition),
    Extend,
    AgentEnds,
}

fn any_step() -> impl Strategy<Value = (i64, Step)> {
    let channels = vec![Channel::Echo, Channel::File, Channel::Mcp, Channel::Api, Channel::Activity];
    let condition = (any::<[bool; 4]>(), prop::option::of(0i64..2_000_000)).prop_map(|(flags, rest)| AgentCondition {
        is_echo_reliable: flags[0],
        at_prompt_since: rest.map(at),
        is_output_held: flags[1] && flags[2],
        is_message_visible: flags[2] && flags[3],
        is_write_stalled: flags[3] && flags[1],
    });
    let step = prop_oneof![
        3 => Just(Step::Begin),
        3 => Just(Step::Enter),
        4 => prop::sample::select(channels).prop_map(Step::Signal),
        8 => condition.prop_map(Step::Tick),
        1 => Just(Step::Extend),
        1 => Just(Step::AgentEnds),
    ];
    // Sometimes back in time: signals may be reordered.
    (prop_oneof![4 => 0i64..20_000, 1 => -20_000i64..0, 1 => 0i64..1_000_000], step)
}

fn any_rules() -> impl Strategy<Value = DeliveryRules> {
    let policies =
        vec![UnverifiedPolicy::Written, UnverifiedPolicy::Settled, UnverifiedPolicy::Strict, UnverifiedPolicy::Failed];
    (any::<[bool; 2]>(), 0u32..=3, prop::sample::select(policies), any::<bool>()).prop_map(
        |([echo, file], max_reinjections, policy, is_high)| DeliveryRules {
            attempt: AttemptRules {
                required: RequiredChannels { echo, file, ..RequiredChannels::NONE },
                echo_window: SIGNAL_WINDOW,
            },
            max_reinjections,
            policy,
            minimum: if is_high { Level::InContext } else { Level::Echoed },
        },
    )
}

proptest! {
    #[test]
    fn one_outcome_at_most_four_writes_and_levels_that_only_rise(
        rules in any_rules(),
        steps in prop::collection::vec(any_step(), 0..80),
    ) {
        let mut delivery = Delivery::new(rules);
        let mut now = 0;
        let (mut outcomes, mut writes, mut level) = (0, 0, Level::Injected);
        for (millis, step) in steps {
            now += millis;
            let effects: Vec<DeliveryEffect> = match step {
                Step::Begin => {
                    let was_final = delivery.state().is_final();
                    let begins = delivery.begin_attempt(at(now));
                    prop_assert!(!(begins && was_final), "typed after its outcome");
                    writes += u32::from(begins);
                    Vec::new()
                }
                Step::Enter => {
                    delivery.enter_written(at(now));
                    Vec::new()
                }
                Step::Signal(channel) => delivery.signal(at(now), channel),
                Step::Tick(condition) => delivery.tick(at(now), &condition),
                Step::Extend => {
                    delivery.extend_echo(at(now));
                    Vec::new()
                }
                Step::AgentEnds => delivery.agent_ended().into_iter().collect(),
            };
            for effect in effects {
                match effect {
                    DeliveryEffect::Verified { proof, .. } => {
                        outcomes += 1;
                        prop_assert!(proof.channel.acknowledges() && proof.level() >= rules.minimum);
                    }
                    DeliveryEffect::Closed { .. } | DeliveryEffect::Failed(_) | DeliveryEffect::Cancelled => outcomes += 1,
                    DeliveryEffect::Upgraded { proof, .. } => {
                        prop_assert!(outcomes == 1 && proof.level() > level);
                    }
                    DeliveryEffect::Reinject { attempt } => prop_assert!(attempt == writes + 1 && outcomes == 0),
                    DeliveryEffect::Held => prop_assert!(outcomes == 0),
                    DeliveryEffect::Ignored { .. } => {}
                }
            }
            prop_assert!(outcomes <= 1, "two outcomes");
            prop_assert_eq!(outcomes == 1, delivery.state().is_final());
            prop_assert!(delivery.level() >= level);
            level = delivery.level();
            prop_assert!(writes <= rules.max_reinjections + 1);
        }
    }
}
