//! Bursts on `domain::nodes::placement`, simulated: no servers, no clock, the same function that the engine calls.
//!
//! Placements of a workspace are serialised, so each sees the reservations of earlier ones. Between bursts the agents
//! start and heartbeats report them, but half of the heartbeats are late and report the state before the burst; only
//! the engine's own count of agents is current.

use std::time::Instant;

use anyhow::{Result, ensure};
use relay_domain::{
    NodeId, ProviderName,
    nodes::placement::{Candidate, PlacementRequest, PlacementTarget, place},
};

use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;

/// Number of consecutive bursts on the same nodes.
const BURSTS: usize = 3;
/// Demand in percent of the capacity in the run that fills the nodes.
const OVERSUBSCRIBED: usize = 120;

/// Places bursts of `burst` invocations on `nodes` equal nodes; then exceeds the capacity of nodes with a limit.
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
    let asked = limit * nodes * OVERSUBSCRIBED / 100;
    let mut fleet = Fleet::new(nodes, u32::try_from(limit)?);
    let mut row = fleet.burst(format!("placement {asked} on {nodes} with room for {limit}"), asked);
    let over = fleet.nodes.iter().filter(|node| node.expected_agents() > node.max).count();
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

/// State of the nodes as known to the engine.
struct Fleet {
    nodes: Vec<Candidate>,
    /// Latest heartbeat of each node.
    reported: Vec<u32>,
    dice: Dice,
}

impl Fleet {
    fn new(count: usize, max: u32) -> Self {
        let node = |id| Candidate {
            node_id: NodeId::new(format!("node_{id}")),
            provider_id: Some(ProviderName::new("broker")),
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
            answer: Latency::from_micros(took),
            ..Row::default()
        }
    }

    /// One invocation. False when no node has room.
    fn place_one(&mut self) -> bool {
        const REQUEST: PlacementRequest = PlacementRequest { target: PlacementTarget::Any };
        let decision = place(&self.nodes, &REQUEST, self.dice.next());
        let Some(taken) = decision.chosen else { return false };
        self.nodes[taken].reserved += 1;
        true
    }

    /// Turns reserved agents into active ones. The odd nodes' heartbeats report a burst late; the engine has registered
    /// their agents all the same, and the larger count holds.
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
        let total: u64 = self.nodes.iter().map(|node| u64::from(node.expected_agents())).sum();
        let most = self.nodes.iter().map(Candidate::expected_agents).max().unwrap_or(0);
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
    fn placements_fill_the_capacity_and_exceed_no_node() {
        let mut fleet = Fleet::new(50, 7);
        assert_eq!(fleet.burst(String::new(), 400).delivered, 350);
        assert!(fleet.nodes.iter().all(|node| node.expected_agents() == 7));
    }
}
