//! Heartbeats and the check of what they declare.

use relay_wire::nodes::frame::InboundFrame;

use super::{
    super::{
        control::{Outcome, Request, RequestEffect},
        effects::Input,
        jobs::{Job, JobResult},
    },
    Action,
    world::{Peer, World},
};

impl World {
    /// Receives a heartbeat with these fields.
    fn beat(&mut self, fields: &str) {
        self.receive(&format!(r#"{{"v":1,"type":"node.heartbeat",{fields}}}"#));
    }

    /// Registers once more on the same connection.
    fn register_again(&mut self) {
        self.receive(
            r#"{"v":1,"type":"node.register","node_id":"here","name":"here","capabilities":[],"max_agents":9,"tags":[],"version":"1"}"#,
        );
        let is_registration =
            |(_, job): &(_, Job)| matches!(job, Job::Request(Request { frame: InboundFrame::Register(_), .. }));
        self.jobs.retain(|job| !is_registration(job));
        let effect = RequestEffect::Registered(self.state.binding().unwrap().clone());
        self.step(Input::Job(JobResult::Request(Box::new(Outcome { reply: None, effect }))));
    }

    /// Finishes the check of a declared change; returns `false` if none is in progress.
    fn finish_check(&mut self, is_known: bool) -> bool {
        let beat = |job: &Job| {
            let Job::Request(Request { frame: InboundFrame::Heartbeat(beat), .. }) = job else { return None };
            Some(beat.clone())
        };
        let Some((index, beat)) = self.jobs.iter().enumerate().find_map(|(n, (_, job))| Some((n, beat(job)?))) else {
            return false;
        };
        self.jobs.remove(index);
        let effect = if is_known { RequestEffect::ChangeChecked(beat) } else { RequestEffect::ChangeUnchecked(beat) };
        self.step(Input::Job(JobResult::Request(Box::new(Outcome { reply: None, effect }))));
        true
    }
}

#[test]
fn a_declared_change_waits_for_its_check_and_the_load_does_not() {
    let mut world = World::new(Peer::Broker, &[(0, 0)]);
    world.act(Action::FinishJob(0));
    let names = |world: &World| -> Vec<_> { world.beats.iter().filter_map(|beat| beat.node_name.clone()).collect() };
    world.beat(r#""active_agents":1,"name":"b","max_agents":3"#);
    world.beat(r#""active_agents":2,"name":"c""#);
    let agents: Vec<_> = world.beats.iter().map(|beat| (beat.active_agents, beat.max_agents)).collect();
    assert_eq!((agents, names(&world)), (vec![(1, None), (2, None)], vec![]));
    // Unchecked, it is requested again by the next heartbeat, with the newer name.
    assert!(world.finish_check(false) && !world.finish_check(true));
    world.beat(r#""active_agents":3"#);
    assert!(world.finish_check(true) && !world.finish_check(true));
    let last = world.beats.last().unwrap();
    assert_eq!((names(&world), last.active_agents, last.max_agents), (vec!["c".to_owned()], 3, Some(3)));
    // What has not changed needs no check, nor does a name that no node can have.
    world.beat(r#""name":"c","max_agents":3,"active_agents":4"#);
    world.beat(&format!(r#""name":"{}""#, "x".repeat(129)));
    assert!(!world.finish_check(true));
    // A registration replaces the limit, so the same one is a change afterwards.
    world.register_again();
    world.beat(r#""active_agents":5,"max_agents":3"#);
    assert!(world.finish_check(true));
    assert_eq!(world.beats.last().unwrap().max_agents, Some(3));
}
