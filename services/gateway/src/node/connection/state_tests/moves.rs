//! Live copies that name another location of their agent.

use relay_domain::mailboxes::stream::Seq;

use super::{
    Action,
    world::{Peer, World},
};

/// Creates a connection that has sent the only row of its agent.
fn world_after_a_frame() -> World {
    let mut world = World::new(Peer::Provider, &[(0, 1)]);
    // The registration, the positions, and the row.
    for _ in 0..3 {
        world.act(Action::FinishJob(0));
    }
    assert_eq!(sent(&world), 1);
    world
}

fn sent(world: &World) -> Seq {
    world.mailboxes.values().map(|mailbox| mailbox.sent).sum()
}

#[test]
fn a_position_from_before_a_move_does_not_resume_the_stream() {
    let mut world = world_after_a_frame();
    world.act(Action::MovedLive(0));
    world.act(Action::Positions);
    assert_eq!(sent(&world), 1, "the position may be older than the copy");
    world.act(Action::FinishJob(0));
    assert_eq!(sent(&world), 2, "the list was read after it");
}

#[test]
fn a_list_requested_before_a_move_does_not_resume_the_stream() {
    let mut world = world_after_a_frame();
    world.act(Action::Relist);
    world.act(Action::Advance(1));
    world.act(Action::MovedLive(0));
    world.act(Action::FinishJob(0));
    assert_eq!(sent(&world), 1);
    world.act(Action::FinishJob(0));
    assert_eq!(sent(&world), 2);
}
