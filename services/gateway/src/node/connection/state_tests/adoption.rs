//! Live copies for agents that are about to be served.

use relay_domain::mailboxes::stream::{NO_COPY_WAIT_MS, Seq};

use super::{
    super::{
        effects::Input,
        jobs::{Job, JobResult, Read},
    },
    Action, CopyChoice,
    world::{Peer, World},
};

impl World {
    /// Serves the agents with positions that were read before something else happens.
    fn serve_after(&mut self, happens_between: impl FnOnce(&mut Self)) {
        let is_serving = |(_, job): &(_, Job)| matches!(job, Job::Read(Read::Serve { .. }));
        let index = self.jobs.iter().position(is_serving).unwrap();
        let (_, Job::Read(Read::Serve { start, .. })) = self.jobs.remove(index) else { unreachable!() };
        let agents = self.located().into_iter().map(|agent| self.position(agent)).collect();
        happens_between(self);
        self.step(Input::Job(JobResult::Serve { start, agents }));
    }
}

#[test]
fn a_copy_between_the_read_of_a_position_and_the_route_is_not_left_to_a_comparison() {
    let mut world = World::new(Peer::Direct, &[(0, 0)]);
    world.act(Action::FinishJob(0));
    world.serve_after(|world| {
        world.act(Action::Post(0));
        world.act(Action::Live(vec![CopyChoice { agent: 0, copy: 0, again: false }]));
    });
    world.act(Action::Advance(NO_COPY_WAIT_MS));
    world.act(Action::FinishJob(0));
    let sent: Vec<Seq> = world.mailboxes.values().map(|mailbox| mailbox.sent).collect();
    assert_eq!(sent, [1]);
}
