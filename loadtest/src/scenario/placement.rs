//! `domain::placement` under bursts, simulated: no servers, no clock, the very function that the engine calls.
//!
//! Placements of a workspace take turns, so each sees what the ones before it have reserved. Between bursts the agents
//! come up and heartbeats tell so, but half of the nodes' are late: they still report what they ran before the burst,
//! and only the engine's own count of agents says otherwise.

use std::time::Instant;

use anyhow::{Result, ensure};
use relay_domain::placement::{Candidate, Request, Target, place};

use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;

/// Bursts on the same nodes, one after another.
const BURSTS: usize = 3;
/// The share of nodes between mean and limit in the run that fills them: asked for is more than fits.
const OVERSUBSCRIBED: f64 = 1.2;

/// Places bursts of `burst` invocations on `nodes` equal nodes; then more than fits on nodes with a limit.
pub(super) fn run(nodes: usize, burst: usize, report: &mut Report) -> Result<()> {
    ensure!(nodes > 0 && burst > 0, "needs nodes and work");
    let mut fleet = Fleet::new(nodes, 0);
    let mut worst: f64 = 0.0;
    for number in 1..=BURSTS {
        let mut row = fleet.burst(format!("placement {burst} on {nodes}, burst {number}"), burst);
        let ratio = fleet.max_to_mean();
        row.figures.insert("max_to_mean".to_owned(), ratio);
        row.notes.push(format!("max/mean {ratio:.3}"));
        if row.delivered != burst as u64 {
            row.problems.push(format!("{} found no node", burst as u64 - row.delivered));
        }
        worst = worst.max(ratio);
        report.add(row);
        fleet.agents_come_up();
    }
    let what = format!("most ÷ mean per node, {burst} placed on {nodes} equal nodes");
    report.ratios.push(Ratio { target: "placement", what, value: worst, ship: 1.1, goal: 1.1, better: Better::Lower });

    let limit = burst.div_ceil(nodes);
    let asked = (limit as f64 * nodes as f64 * OVERSUBSCRIBED) as usize;
    let mut fleet = Fleet::new(nodes, u32::try_from(limit)?);
    let mut row = fleet.burst(format!("placement {asked} on {nodes} with room for {limit}"), asked);
    let over = fleet.nodes.iter().filter(|node| node.fill() > node.max).count();
    if over > 0 {
        row.problems.push(format!("{over} nodes over their capacity"));
    }
    if row.delivered != (limit * nodes) as u64 {
        row.problems.push(format!("{} placed where {} fit", row.delivered, limit * nodes));
    }
    row.notes.push(format!("{over} nodes over their capacity, {} refused", asked as u64 - row.delivered));
    report.add(row);
    Ok(())
}

/// Nodes as the engine knows them.
struct Fleet {
    nodes: Vec<Candidate>,
    /// What each node's heartbeat reported last.
    reported: Vec<u32>,
    dice: Dice,
}

impl Fleet {
    fn new(count: usize, max: u32) -> Self {
        let node = |id| Candidate {
            node_id: format!("node_{id}"),
            provider_id: Some("broker".to_owned()),
            capable: true,
            live: true,
            draining: false,
            handlers_live: true,
            active: 0,
            reserved: 0,
            max,
            load: None,
            avoided: false,
        };
        Self { nodes: (0..count).map(node).collect(), reported: vec![0; count], dice: Dice(0x5eed) }
    }

    fn burst(&mut self, run: String, count: usize) -> Row {
        let began = Instant::now();
        let mut took = Vec::with_capacity(count);
        let mut placed = 0;
        for _ in 0..count {
            let decided = Instant::now();
            placed += u64::from(self.place_one());
            took.push(u32::try_from(decided.elapsed().as_micros()).unwrap_or(u32::MAX));
        }
        let seconds = began.elapsed().as_secs_f64();
        Row {
            run,
            accepted: placed,
            delivered: placed,
            seconds,
            per_second: Some(placed as f64 / seconds),
            answer: Latency::of(took),
            ..Row::default()
        }
    }

    /// One invocation. False when no node has room.
    fn place_one(&mut self) -> bool {
        const REQUEST: Request = Request { target: Target::Any };
        let decision = place(&self.nodes, &REQUEST, self.dice.next());
        let Some(taken) = decision.chosen else { return false };
        self.nodes[taken].reserved += 1;
        true
    }

    /// What was promised runs now. The odd nodes' heartbeats tell a burst late; the engine has registered their
    /// agents all the same, and the larger count holds.
    fn agents_come_up(&mut self) {
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let located = node.active + node.reserved;
            if at % 2 == 0 {
                self.reported[at] = located;
            }
            node.active = located.max(self.reported[at]);
            node.reserved = 0;
        }
    }

    fn max_to_mean(&self) -> f64 {
        let total: u64 = self.nodes.iter().map(|node| u64::from(node.fill())).sum();
        let most = self.nodes.iter().map(Candidate::fill).max().unwrap_or(0);
        f64::from(most) * self.nodes.len() as f64 / total.max(1) as f64
    }
}

/// A Weyl sequence: enough for dice that `place` mixes anyway, and the same in each run.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0 ^ (self.0 >> 29)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_stay_even_though_heartbeats_are_late() {
        let mut fleet = Fleet::new(100, 0);
        for _ in 0..BURSTS {
            assert_eq!(fleet.burst(String::new(), 2000).delivered, 2000);
            assert!(fleet.max_to_mean() <= 1.1, "{}", fleet.max_to_mean());
            fleet.agents_come_up();
        }
    }

    #[test]
    fn what_fits_is_placed_and_no_node_gets_more() {
        let mut fleet = Fleet::new(50, 7);
        assert_eq!(fleet.burst(String::new(), 400).delivered, 350);
        assert!(fleet.nodes.iter().all(|node| node.fill() == 7));
    }
}
