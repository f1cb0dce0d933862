//! `domain::placement` under bursts, simulated: no servers, no clock, the very function that the engine calls.
//!
//! Many place at once, so each decides on what it read a while ago: the last placements, up to as many as are in
//! flight, are hidden from it. Whoever reserves sees the two rows that it touches as they are, as a transaction does
//! that has locked them. Between bursts the agents come up and heartbeats tell so, but half of the nodes' are late:
//! they still report what they ran before the burst, and only the engine's own count of agents says otherwise.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Result, ensure};
use relay_domain::placement::{Candidate, Request, Target, place, prefer_second};

use crate::cli::Common;
use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;

/// Bursts on the same nodes, one after another.
const BURSTS: usize = 3;
/// The share of nodes between mean and limit in the run that fills them: asked for is more than fits.
const OVERSUBSCRIBED: f64 = 1.2;

/// Places bursts of `burst` invocations on `nodes` equal nodes while `in_flight` decide at once; then more than fits
/// on nodes with a limit.
pub(super) fn run(common: &Common, nodes: usize, burst: usize, report: &mut Report) -> Result<()> {
    ensure!(nodes > 0 && burst > 0, "needs nodes and work");
    let in_flight = usize::from(common.in_flight);
    let mut fleet = Fleet::new(nodes, 0, in_flight);
    let mut worst: f64 = 0.0;
    for number in 1..=BURSTS {
        let mut row = fleet.burst(format!("placement {burst} on {nodes}, burst {number}"), burst);
        let ratio = fleet.max_to_mean();
        row.figures.insert("max_to_mean".to_owned(), ratio);
        row.notes.push(format!("max/mean {ratio:.3}, {in_flight} deciding at once"));
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
    let mut fleet = Fleet::new(nodes, u32::try_from(limit)?, in_flight);
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

/// Nodes as the engine knows them, and what was placed lately.
struct Fleet {
    nodes: Vec<Candidate>,
    /// What placers that read before cannot see; the newest last.
    lately: VecDeque<usize>,
    in_flight: usize,
    /// What each node's heartbeat reported last.
    reported: Vec<u32>,
    dice: Dice,
}

impl Fleet {
    fn new(count: usize, max: u32, in_flight: usize) -> Self {
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
        Self {
            nodes: (0..count).map(node).collect(),
            lately: VecDeque::new(),
            in_flight,
            reported: vec![0; count],
            dice: Dice(0x5eed),
        }
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

    /// One invocation: decided on an old view, reserved on the present one, and again if there was no room left.
    fn place_one(&mut self) -> bool {
        const REQUEST: Request = Request { target: Target::Any };
        let mut hidden = self.dice.below(self.in_flight + 1).min(self.lately.len());
        loop {
            for &at in self.lately.iter().rev().take(hidden) {
                self.nodes[at].reserved -= 1;
            }
            let decision = place(&self.nodes, &REQUEST, self.dice.next());
            let seen = decision.chosen.map(|at| self.nodes[at].fill());
            for &at in self.lately.iter().rev().take(hidden) {
                self.nodes[at].reserved += 1;
            }
            let (Some(first), Some(seen)) = (decision.chosen, seen) else { return false };
            let fill = |at: usize| self.nodes[at].fill();
            let second = decision.second.filter(|&at| !self.nodes[at].full());
            let taken = second.filter(|&at| prefer_second(seen, fill(first), fill(at))).unwrap_or(first);
            if !self.nodes[taken].full() {
                self.nodes[taken].reserved += 1;
                self.lately.push_back(taken);
                if self.lately.len() > self.in_flight {
                    self.lately.pop_front();
                }
                return true;
            }
            // The reservation was refused: the next decision reads anew.
            hidden = 0;
        }
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
        self.lately.clear();
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

    fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_stays_even_though_many_decide_at_once() {
        let mut fleet = Fleet::new(100, 0, 64);
        for _ in 0..BURSTS {
            assert_eq!(fleet.burst(String::new(), 2000).delivered, 2000);
            assert!(fleet.max_to_mean() <= 1.1, "{}", fleet.max_to_mean());
            fleet.agents_come_up();
        }
    }

    #[test]
    fn what_fits_is_placed_and_no_node_gets_more() {
        let mut fleet = Fleet::new(50, 7, 64);
        assert_eq!(fleet.burst(String::new(), 400).delivered, 350);
        assert!(fleet.nodes.iter().all(|node| node.fill() == 7));
    }
}
