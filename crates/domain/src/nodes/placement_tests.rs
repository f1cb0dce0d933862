use proptest::prelude::*;

use super::*;

fn node(id: usize) -> Candidate {
    Candidate {
        node_id: NodeId::new(format!("node_{id}")),
        provider_id: Some(ProviderName::new("broker")),
        capable: true,
        live: true,
        draining: false,
        handlers_live: true,
        active: 0,
        reserved: 0,
        max: 0,
        load: None,
        avoided: false,
    }
}

const ANY: PlacementRequest = PlacementRequest { target: PlacementTarget::Any };

fn any_candidate() -> impl Strategy<Value = Candidate> {
    let flags = (0..10_u8, 0..10_u8, 0..10_u8, 0..10_u8, 0..4_u8);
    let counts = (0..6_u32, 0..6_u32, 0..10_u32, proptest::option::of(0.0..1.0_f64));
    (flags, counts).prop_map(|((capable, live, draining, handlers, avoided), (active, reserved, max, load))| {
        Candidate {
            capable: capable > 0,
            live: live > 0,
            draining: draining == 0,
            handlers_live: handlers > 0,
            avoided: avoided == 0,
            active,
            reserved,
            max,
            load,
            ..node(0)
        }
    })
}

fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
    proptest::collection::vec(any_candidate(), 0..12).prop_map(|mut candidates| {
        for (at, candidate) in candidates.iter_mut().enumerate() {
            candidate.node_id = NodeId::new(format!("node_{at}"));
        }
        candidates
    })
}

fn any_request() -> impl Strategy<Value = PlacementRequest> {
    let target = prop_oneof![
        Just(PlacementTarget::Any),
        (0..12_usize).prop_map(|at| PlacementTarget::Node(NodeId::new(format!("node_{at}"))))
    ];
    target.prop_map(|target| PlacementRequest { target })
}

fn fit(candidate: &Candidate, request: &PlacementRequest) -> bool {
    let room = candidate.max == 0 || candidate.active + candidate.reserved < candidate.max;
    let meant = match &request.target {
        PlacementTarget::Any => true,
        PlacementTarget::Node(id) => *id == candidate.node_id,
        PlacementTarget::Provider(id, provider) => {
            *id == candidate.node_id && candidate.provider_id.as_ref() == Some(provider)
        }
    };
    candidate.capable && candidate.live && !candidate.draining && candidate.handlers_live && room && meant
}

proptest! {
    #[test]
    fn only_an_eligible_node_is_chosen(candidates in any_candidates(), request in any_request(), entropy: u64) {
        let decision = place(&candidates, &request, entropy);
        if let Some(at) = decision.chosen {
            prop_assert!(fit(&candidates[at], &request));
        }
        prop_assert_eq!(decision.chosen.is_some(), candidates.iter().any(|candidate| fit(candidate, &request)));
    }

    #[test]
    fn every_ineligible_node_has_a_reason(candidates in any_candidates(), request in any_request(), entropy: u64) {
        let decision = place(&candidates, &request, entropy);
        for (id, reason) in &decision.skipped {
            let candidate = candidates.iter().find(|candidate| candidate.node_id == *id).expect("a candidate");
            prop_assert_eq!(fit(candidate, &request), *reason == SkipReason::Avoided);
            prop_assert!(decision.chosen.is_none_or(|at| candidates[at].node_id != *id));
        }
        let unfit = candidates.iter().filter(|candidate| !fit(candidate, &request));
        for candidate in unfit {
            prop_assert!(decision.skipped.iter().any(|(id, _)| *id == candidate.node_id));
        }
    }

    #[test]
    fn no_less_loaded_node_is_passed_over(candidates in any_candidates(), request in any_request(), entropy: u64) {
        if let Some(chosen) = place(&candidates, &request, entropy).chosen {
            let others = candidates.iter().filter(|other| fit(other, &request) && !other.avoided);
            for other in others {
                prop_assert!(candidates[chosen].avoided || candidates[chosen].compare(other).is_le());
                prop_assert!(!candidates[chosen].avoided, "{} can do it and has not failed", other.node_id);
            }
        }
    }

    #[test]
    fn an_additional_eligible_node_never_prevents_a_placement(
        mut candidates in any_candidates(), at in 0..13_usize, request in any_request(), entropy: u64,
    ) {
        let before = place(&candidates, &request, entropy).chosen.is_some();
        candidates.insert(at.min(candidates.len()), node(99));
        let after = place(&candidates, &request, entropy).chosen.is_some();
        prop_assert!(after || !before);
        prop_assert!(after || request.target != PlacementTarget::Any);
    }

    #[test]
    fn equal_nodes_get_equal_work(
        nodes in 1..40_usize, rounds in 1..8_u32, load in proptest::option::of(0.0..1.0_f64), seed: u64,
    ) {
        let mut candidates: Vec<_> = (0..nodes).map(|id| Candidate { load, ..node(id) }).collect();
        for work in 0..nodes as u64 * u64::from(rounds) {
            let chosen = place(&candidates, &ANY, seed.wrapping_add(work)).chosen.expect("all are eligible");
            candidates[chosen].reserved += 1;
        }
        prop_assert!(candidates.iter().all(|candidate| candidate.reserved == rounds));
    }

    #[test]
    fn a_burst_fills_every_node_and_exceeds_none(limits in proptest::collection::vec(1..9_u32, 1..20), seed: u64) {
        let with_limit = |(id, &max): (usize, &u32)| Candidate { max, load: Some(0.2), ..node(id) };
        let mut candidates: Vec<_> = limits.iter().enumerate().map(with_limit).collect();
        let total: u32 = limits.iter().sum();
        for work in 0..u64::from(total) {
            let chosen = place(&candidates, &ANY, seed ^ work).chosen.expect("there is room");
            candidates[chosen].reserved += 1;
        }
        prop_assert!(candidates.iter().all(|candidate| candidate.reserved == candidate.max));
        let decision = place(&candidates, &ANY, seed);
        prop_assert_eq!(decision.chosen, None);
        prop_assert!(decision.skipped.iter().all(|(_, reason)| *reason == SkipReason::Full));
    }
}

#[test]
fn measured_nodes_come_first_then_lower_load_then_fewer_agents() {
    let unmeasured = node(0);
    let busy = Candidate { load: Some(0.9), ..node(1) };
    let idle = Candidate { load: Some(0.1), active: 3, ..node(2) };
    let idle_and_empty = Candidate { load: Some(0.1), ..node(3) };
    let check = |candidates: &[&Candidate], expected: &str| {
        let candidates: Vec<_> = candidates.iter().map(|&candidate| candidate.clone()).collect();
        for entropy in 0..64 {
            let chosen = place(&candidates, &ANY, entropy).chosen.expect("all are eligible");
            assert_eq!(candidates[chosen].node_id.as_str(), expected);
        }
    };
    check(&[&unmeasured, &busy], "node_1");
    check(&[&unmeasured, &busy, &idle], "node_2");
    check(&[&unmeasured, &busy, &idle, &idle_and_empty], "node_3");
}

#[test]
fn reservations_count_as_load_before_a_heartbeat_shows_them() {
    let promised = Candidate { load: Some(0.1), reserved: 5, max: 10, ..node(0) };
    let idle = Candidate { load: Some(0.3), max: 10, ..node(1) };
    assert_eq!(place(&[promised, idle], &ANY, 7).chosen, Some(1));
}

#[test]
fn a_node_that_failed_is_chosen_only_without_alternatives() {
    let failed = Candidate { avoided: true, ..node(0) };
    let other = Candidate { active: 100, ..node(1) };
    let decision = place(&[failed.clone(), other], &ANY, 3);
    assert_eq!(decision.chosen, Some(1));
    assert_eq!(decision.skipped, [(NodeId::new("node_0"), SkipReason::Avoided)]);
    assert_eq!(place(&[failed], &ANY, 3).chosen, Some(0));
}

#[test]
fn equal_nodes_are_chosen_at_random() {
    let candidates: Vec<_> = (0..10).map(node).collect();
    let mut drawn = [0_u32; 10];
    for entropy in 0..10_000 {
        drawn[place(&candidates, &ANY, entropy).chosen.expect("all are eligible")] += 1;
    }
    assert!(drawn.iter().all(|count| (850..1150).contains(count)), "{drawn:?}");
}

#[test]
fn work_begun_by_a_provider_is_finished_by_that_provider() {
    let of = |provider: &str| Candidate { provider_id: Some(ProviderName::new(provider)), ..node(1) };
    let candidates = [of("one"), of("two"), Candidate { provider_id: Some(ProviderName::new("two")), ..node(2) }];
    let request =
        PlacementRequest { target: PlacementTarget::Provider(NodeId::new("node_1"), ProviderName::new("two")) };
    for entropy in 0..50 {
        let decision = place(&candidates, &request, entropy);
        assert_eq!(decision.chosen, Some(1));
        assert!(decision.skipped.iter().all(|(_, skip)| *skip == SkipReason::NotTargeted));
    }
    assert_eq!(place(&candidates[..1], &request, 0).chosen, None);
}
