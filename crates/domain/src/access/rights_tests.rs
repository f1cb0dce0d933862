use proptest::prelude::*;

use super::*;

const ME: AgentId = AgentId::new(1);
const CHILD: AgentId = AgentId::new(2);
const OTHER: AgentId = AgentId::new(3);

fn with(settings: &[(Right, bool)]) -> Actor {
    let settings = settings.iter().copied().collect();
    Actor::Agent { id: ME, rights: Rights::new(&RightSettings::default(), &settings) }
}

/// Every operation, in each relation to the actor.
fn operations() -> Vec<Operation> {
    let mut all = vec![
        Operation::Send,
        Operation::Join,
        Operation::Spawn,
        Operation::Subscribe,
        Operation::CreateTrigger,
        Operation::DefineAction,
        Operation::PostThroughNode { node: PostingNode::Broker },
        Operation::PostThroughNode { node: PostingNode::Own },
        Operation::PostThroughNode { node: PostingNode::OfAnother },
    ];
    for party in [None, Some(ME), Some(OTHER)] {
        all.extend([
            Operation::ManageSubscription { owner: party },
            Operation::ManageTrigger { creator: party },
            Operation::ManageAction { handler: party },
            Operation::Release { agent: OTHER, spawned_by: party },
            Operation::Release { agent: ME, spawned_by: party },
            Operation::Delete { spawned_by: party },
            Operation::ReadInvocation { caller: party, handler: None },
            Operation::ReadInvocation { caller: None, handler: party },
        ]);
    }
    all
}

#[test]
fn the_workspace_key_may_do_everything() {
    for operation in operations() {
        assert_eq!(check(Actor::Workspace, operation), Ok(()), "{operation:?}");
    }
}

#[test]
fn an_outsider_may_do_nothing() {
    for operation in operations() {
        assert!(check(Actor::Outsider, operation).is_err(), "{operation:?}");
    }
}

#[test]
fn the_defaults_are_those_of_the_documentation() {
    let me = with(&[]);
    for (operation, expected) in [
        (Operation::Send, Ok(())),
        (Operation::Join, Ok(())),
        (Operation::Spawn, Ok(())),
        (Operation::Subscribe, Ok(())),
        (Operation::CreateTrigger, Ok(())),
        (Operation::DefineAction, Ok(())),
        (Operation::ManageSubscription { owner: Some(ME) }, Ok(())),
        (Operation::ManageSubscription { owner: Some(OTHER) }, Err(Refusal::SubscriptionNotOwn)),
        (Operation::ManageSubscription { owner: None }, Err(Refusal::SubscriptionNotOwn)),
        (Operation::ManageTrigger { creator: Some(ME) }, Ok(())),
        (Operation::ManageTrigger { creator: None }, Err(Refusal::TriggerNotOwn)),
        (Operation::ManageAction { handler: Some(ME) }, Ok(())),
        (Operation::ManageAction { handler: Some(OTHER) }, Err(Refusal::NotHandler)),
        (Operation::ManageAction { handler: None }, Err(Refusal::NotHandler)),
        (Operation::Release { agent: ME, spawned_by: None }, Ok(())),
        (Operation::Release { agent: CHILD, spawned_by: Some(ME) }, Ok(())),
        (Operation::Release { agent: OTHER, spawned_by: None }, Err(Refusal::NotSpawnedByCaller)),
        (Operation::Release { agent: OTHER, spawned_by: Some(CHILD) }, Err(Refusal::NotSpawnedByCaller)),
        (Operation::Delete { spawned_by: Some(ME) }, Ok(())),
        (Operation::Delete { spawned_by: None }, Err(Refusal::NotSpawnedByCaller)),
        (Operation::ReadInvocation { caller: Some(ME), handler: Some(OTHER) }, Ok(())),
        (Operation::ReadInvocation { caller: Some(OTHER), handler: Some(ME) }, Ok(())),
        (Operation::ReadInvocation { caller: None, handler: None }, Err(Refusal::InvocationNotOwn)),
        (Operation::PostThroughNode { node: PostingNode::Broker }, Ok(())),
        (Operation::PostThroughNode { node: PostingNode::Own }, Ok(())),
        (Operation::PostThroughNode { node: PostingNode::OfAnother }, Err(Refusal::PostThroughNode)),
    ] {
        assert_eq!(check(me, operation), expected, "{operation:?}");
    }
}

#[test]
fn a_closed_release_ends_neither_itself_nor_children() {
    let closed = with(&[(Right::ReleaseSpawned, false)]);
    let own = Operation::Release { agent: ME, spawned_by: None };
    assert_eq!(check(closed, own), Err(Refusal::Release));
    let child = Operation::Release { agent: CHILD, spawned_by: Some(ME) };
    assert_eq!(check(closed, child), Err(Refusal::Release));
    assert_eq!(check(closed, Operation::Delete { spawned_by: Some(ME) }), Err(Refusal::NotSpawnedByCaller));
    let any = with(&[(Right::ReleaseSpawned, false), (Right::ReleaseAny, true)]);
    assert_eq!(check(any, own), Ok(()));
}

#[test]
fn overrides_precede_the_policy_and_the_policy_the_default() {
    let settings = |value: Option<bool>| value.map(|value| (Right::Spawn, value)).into_iter().collect();
    for (policy, own, expected) in [
        (None, None, true),
        (Some(false), None, false),
        (Some(false), Some(true), true),
        (Some(true), Some(false), false),
        (None, Some(false), false),
    ] {
        assert_eq!(Rights::new(&settings(policy), &settings(own)).has(Right::Spawn), expected, "{policy:?} {own:?}");
    }
}

#[test]
fn settings_have_the_words_of_the_wire() {
    let settings: RightSettings = serde_json::from_str(r#"{"release_any":true,"spawn":false}"#).unwrap();
    assert_eq!((settings.get(Right::ReleaseAny), settings.get(Right::Spawn)), (Some(true), Some(false)));
    assert_eq!(serde_json::to_string(&settings).unwrap(), r#"{"spawn":false,"release_any":true}"#);
    for wrong in [r#"{"fly":true}"#, r#"{"spawn":1}"#, "[]"] {
        assert!(serde_json::from_str::<RightSettings>(wrong).is_err(), "{wrong}");
    }
    for right in Right::ALL {
        assert_eq!(serde_json::to_string(right).unwrap(), format!("\"{}\"", right.as_str()));
    }
}

fn any_settings() -> impl Strategy<Value = RightSettings> {
    prop::collection::btree_map(prop::sample::select(Right::ALL), any::<bool>(), 0..Right::ALL.len())
        .prop_map(|settings| settings.into_iter().collect())
}

proptest! {
    /// Granting a right never takes an operation away, and a refusal names a right that permits it when granted.
    #[test]
    fn rights_only_add(policy in any_settings(), own in any_settings(), granted in prop::sample::select(Right::ALL)) {
        let rights = Rights::new(&policy, &own);
        let with_granted = Right::ALL
            .iter()
            .map(|right| (*right, *right == granted || rights.has(*right)))
            .collect::<RightSettings>();
        let more = Rights::new(&RightSettings::default(), &with_granted);
        for operation in operations() {
            let before = check(Actor::Agent { id: ME, rights }, operation);
            let after = check(Actor::Agent { id: ME, rights: more }, operation);
            prop_assert!(before.is_err() || after.is_ok(), "{operation:?} with {granted:?}");
            if let Err(refusal) = before && refusal.right() == Some(granted) {
                let direct = matches!(operation, Operation::PostThroughNode { node: PostingNode::Own | PostingNode::OfAnother });
                let sends = matches!(operation, Operation::PostThroughNode { .. }) && !more.has(Right::Send);
                prop_assert!(after.is_ok() || direct || sends, "{operation:?} with {granted:?}");
            }
        }
    }
}
