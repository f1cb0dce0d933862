use std::time::Duration;

use super::*;
use crate::channel::SIGNAL_WINDOW;

const ALL_USABLE: RequiredChannels = RequiredChannels { echo: true, file: true, mcp: true, api: true };
const ECHO_MISSING: DeliveryRecord = DeliveryRecord { echo_after: None, has_file_ack: true, has_api_ack: false };
const EARLY_ECHO: DeliveryRecord =
    DeliveryRecord { echo_after: Some(Duration::from_secs(2)), has_file_ack: false, has_api_ack: false };

fn rules(harness: &str) -> DeliveryRules {
    Strategy::builtin(harness).rules(ALL_USABLE, &Learned::new(), Level::Echoed)
}

fn record_times(learned: &mut Learned, times: usize, record: DeliveryRecord) -> Vec<LearnedChange> {
    (0..times).flat_map(|_| learned.record(record)).collect()
}

#[test]
fn the_table_has_the_known_harnesses() {
    for (harness, mcp, max_reinjections, policy) in [
        ("claude", true, 3, UnverifiedPolicy::Failed),
        ("aider", false, 3, UnverifiedPolicy::Failed),
        ("codex", false, 0, UnverifiedPolicy::Settled),
        ("gemini", false, 0, UnverifiedPolicy::Settled),
        ("goose", false, 0, UnverifiedPolicy::Settled),
        ("opencode", false, 0, UnverifiedPolicy::Settled),
    ] {
        let rules = rules(harness);
        assert_eq!(rules.attempt.required, RequiredChannels { echo: true, file: true, mcp, api: false }, "{harness}");
        assert_eq!((rules.max_reinjections, rules.policy), (max_reinjections, policy), "{harness}");
    }
    let other = rules("cat");
    assert!(other.attempt.required.is_empty());
    assert_eq!((other.max_reinjections, other.policy), (0, UnverifiedPolicy::Written));
    let headless = Strategy::HEADLESS.rules(ALL_USABLE, &Learned::new(), Level::Echoed);
    assert!(headless.attempt.required.api && !headless.attempt.required.echo);
    assert_eq!((headless.max_reinjections, headless.policy), (0, UnverifiedPolicy::Failed));
}

#[test]
fn a_channel_that_cannot_work_is_not_required() {
    let usable = RequiredChannels { echo: true, ..RequiredChannels::NONE };
    let rules = Strategy::builtin("claude").rules(usable, &Learned::new(), Level::Echoed);
    assert_eq!(rules.attempt.required, usable);
}

#[test]
fn an_echo_that_does_not_come_is_not_required_until_it_does() {
    let claude = Strategy::builtin("claude");
    let mut learned = Learned::new();
    assert_eq!(record_times(&mut learned, 19, ECHO_MISSING), []);
    assert_eq!(learned.record(DeliveryRecord::default()), [], "silence on all channels says nothing");
    assert!(claude.waits_for_verdict(&learned));
    assert_eq!(learned.record(ECHO_MISSING), [LearnedChange::EchoUnreliable]);
    assert_eq!(learned.record(ECHO_MISSING), []);

    let rules = claude.rules(ALL_USABLE, &learned, Level::Echoed);
    assert_eq!(rules.attempt.required, RequiredChannels { file: true, mcp: true, ..RequiredChannels::NONE });
    assert_eq!((rules.max_reinjections, rules.policy), (0, UnverifiedPolicy::Settled));
    assert!(!claude.waits_for_verdict(&learned));
    let echo_only = RequiredChannels { echo: true, ..RequiredChannels::NONE };
    assert_eq!(claude.rules(echo_only, &learned, Level::Echoed).policy, UnverifiedPolicy::Written);

    let late = DeliveryRecord { echo_after: Some(Duration::from_millis(2001)), ..EARLY_ECHO };
    assert_eq!(record_times(&mut learned, 19, EARLY_ECHO), []);
    assert_eq!(learned.record(late), []);
    assert_eq!(record_times(&mut learned, 20, EARLY_ECHO), [LearnedChange::EchoReliable]);
    assert_eq!(record_times(&mut learned, 19, ECHO_MISSING), [], "the count starts again");
}

#[test]
fn file_acks_shorten_the_echo_window_with_hysteresis() {
    let no_ack = EARLY_ECHO;
    let file_ack = DeliveryRecord { has_file_ack: true, ..EARLY_ECHO };
    let mut learned = Learned::new();
    assert_eq!(record_times(&mut learned, 49, no_ack), []);
    assert_eq!(record_times(&mut learned, 450, file_ack), [], "499 deliveries are too few");
    assert_eq!(learned.record(no_ack), [], "450 of 500 are not more than 90 %");
    assert_eq!(learned.record(file_ack), [LearnedChange::EchoWindowShort]);
    assert_eq!(learned.echo_window(), SHORT_ECHO_WINDOW);
    assert_eq!(learned.file_ack_percent(), Some(90.2));
    let until_restored = (1..=500).find(|_| learned.record(no_ack) == [LearnedChange::EchoWindowFull]);
    assert!(until_restored.is_some());
    assert_eq!(learned.file_ack_percent(), Some(79.8));
    assert_eq!(learned.echo_window(), SIGNAL_WINDOW);
    learned.reset();
    assert_eq!(learned, Learned::new());
}
