//! Property tests of the connection state without a socket: random inputs, and what must hold of the effects.

mod adoption;
mod heartbeats;
mod moves;
mod world;

use std::time::Duration;

use proptest::prelude::*;
use relay_domain::{AgentId, mailboxes::stream::Seq};
use relay_engine::mailboxes::serving::LiveFrame;

use self::world::{Peer, World};
use super::effects::Input;
use crate::node::registry::Event;

/// Recovery epoch of all connections.
const RECOVERY_EPOCH: i64 = 2;

/// Random event of a test. Indices are taken modulo the number of candidates.
#[derive(Debug, Clone)]
enum Action {
    /// A message is committed for an agent; its live copy waits.
    Post(usize),
    /// Waiting live copies arrive together.
    Live(Vec<CopyChoice>),
    LoseLive(usize),
    /// A copy arrives whose delivery was lost in a recovery; its number is the next one.
    LostLive(usize),
    /// A live copy says that the agent was located elsewhere.
    MovedLive(usize),
    /// An agent moves to another node or back.
    Move(usize),
    /// The node acks this many frames beyond its last ack.
    Ack(usize, Seq),
    /// The node acks a barrier or answers a position probe, with nothing if it was restarted.
    Answer {
        is_restarted: bool,
    },
    /// The node sends its inventory.
    Inventory,
    FinishJob(usize),
    FailRepair,
    Relist,
    /// The silence check reports positions.
    Positions,
    Advance(u64),
    Room(usize),
    Trust(bool),
    TakenOver,
}

/// Waiting live copy of an agent.
#[derive(Debug, Clone)]
struct CopyChoice {
    agent: usize,
    copy: usize,
    /// It stays, and may arrive again.
    again: bool,
}

fn copy_choice() -> impl Strategy<Value = CopyChoice> {
    (0..3_usize, 0..9_usize, prop::bool::weighted(0.1)).prop_map(|(agent, copy, again)| CopyChoice {
        agent,
        copy,
        again,
    })
}

fn action() -> impl Strategy<Value = Action> {
    let agent = 0..3_usize;
    prop_oneof![
        20 => agent.clone().prop_map(Action::Post),
        20 => prop::collection::vec(copy_choice(), 1..6).prop_map(Action::Live),
        3 => agent.clone().prop_map(Action::LoseLive),
        2 => agent.clone().prop_map(Action::LostLive),
        1 => agent.clone().prop_map(Action::MovedLive),
        1 => agent.clone().prop_map(Action::Move),
        12 => (agent, 0..9_i64).prop_map(|(agent, more)| Action::Ack(agent, more)),
        8 => prop::bool::weighted(0.3).prop_map(|is_restarted| Action::Answer { is_restarted }),
        2 => Just(Action::Inventory),
        20 => (0..4_usize).prop_map(Action::FinishJob),
        1 => Just(Action::FailRepair),
        1 => Just(Action::Relist),
        2 => Just(Action::Positions),
        12 => (0..300_u64).prop_map(Action::Advance),
        4 => (0..40_usize).prop_map(Action::Room),
        2 => prop::bool::weighted(0.7).prop_map(Action::Trust),
        1 => Just(Action::TakenOver),
    ]
}

#[test]
fn a_broker_that_confirms_nothing_is_not_polled() {
    let mut world = World::new(Peer::BrokerWithoutCursors, &[(0, 400), (0, 400)]);
    world.exhaust_window();
    assert!(world.time_to_wake() >= Duration::from_secs(1), "{:?}", world.time_to_wake());
    // Its confirmation goes on with the frames that waited.
    let sent = |world: &World| world.mailboxes.values().map(|mailbox| mailbox.sent).sum::<Seq>();
    let before = sent(&world);
    world.act(Action::Answer { is_restarted: false });
    world.act(Action::FinishJob(0));
    assert!(sent(&world) > before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is lost, repeated, reordered, moved or refused: frames of an agent leave in order and once, only under
    /// a lease, only while the agent is here and within every window; in the end all of them have left and are acked.
    #[test]
    fn every_message_arrives_in_order_whatever_happens(
        peer in prop::sample::select(&Peer::ALL[..]),
        agents in prop::collection::vec((prop_oneof![9 => 0..50_i64, 1 => Just(150_000)], 0..150_i64), 3),
        actions in prop::collection::vec(action(), 0..400),
    ) {
        let mut world = World::new(peer, &agents);
        actions.into_iter().for_each(|action| world.act(action));
        prop_assert_eq!(world.state.closing(), None);
        world.settle();
        for (agent, mailbox) in &world.mailboxes {
            prop_assert_eq!(mailbox.ack_floor, mailbox.head, "{}: {:?}", agent, mailbox);
        }
    }

    /// The end routes no agent here any more, whatever came before.
    #[test]
    fn the_end_leaves_no_route(
        peer in prop::sample::select(&Peer::ALL[..]),
        actions in prop::collection::vec(action(), 0..100),
    ) {
        let mut world = World::new(peer, &[(3, 5), (0, 1), (0, 0)]);
        actions.into_iter().for_each(|action| world.act(action));
        world.step(Input::Event(Event::Close { code: 1013, reason: "drained" }));
        prop_assert_eq!(world.state.closing(), Some((1013, "drained")));
        world.state.stop();
        world.state.drop_all_agents();
        while let Some(effect) = world.state.next_effect() {
            world.perform(effect);
        }
        let routed: Vec<_> = world.mailboxes.iter().filter(|(_, mailbox)| mailbox.is_routed).collect();
        prop_assert!(routed.is_empty(), "{:?}", routed);
    }
}

/// Live copy of a delivery that was committed under the epoch of the connection.
fn live(agent: AgentId, seq: Seq, node: &str) -> LiveFrame {
    LiveFrame {
        seq,
        delivery_id: format!("dlv_1_{seq}"),
        location: format!("{node}/default"),
        body: Some(format!("{agent}/{seq}").into()),
        traceparent: None,
        epoch: Some(RECOVERY_EPOCH),
        expires_at_ms: None,
    }
}
