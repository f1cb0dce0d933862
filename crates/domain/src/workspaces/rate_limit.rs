//! Rate limits: costs of requests, and the leases by which gateways share the limit of a minute.
//!
//! A limit is a number of units per minute, counted in one row of storage. A gateway acquires units from the row in
//! batches, ahead of use, and spends them from memory. Unspent units expire with their minute.
//!
//! Before it has acquired anything, a gateway may spend a small number of *advance units*, so that a workspace with
//! little traffic causes no writes. All gateways together stay within the limit plus the advance units of each.

/// Length of a rate limit window, in seconds.
pub const WINDOW_SECONDS: i64 = 60;
/// Cost of a plain request in units. Divisible by the factors that the costs of routes need (docs/limits.md, "Request
/// rates").
pub const UNITS_PER_REQUEST: u32 = 6;
// More batches divide the limit more evenly among gateways, and cost more writes.
/// Number of batches in which a limit is acquired.
const BATCHES: u32 = 16;
/// Divisor of a limit for the advance units of one gateway.
const ADVANCE_DIVISOR: u32 = 32;
/// Cost of the most expensive request; the advance units cover at least one.
const MAX_COST: u32 = 20;

/// Routes with the same cost and bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouteClass {
    /// Routes without a class of their own.
    Plain,
    /// Posts to a channel: half the rate.
    ChannelMessage,
    /// `POST /v1/dm`: half the rate.
    DirectMessage,
    /// `POST /v1/dm/group`: 0.3 times the rate.
    GroupConversation,
    /// Reactions: 0.4 times the rate.
    Reaction,
    /// Reads of all agents' presence: 0.3 times the rate.
    Presence,
    /// `GET /v1/workspace`.
    WorkspaceInfo,
    /// Session events and read receipts, which brokers send several times a second.
    Signal,
    /// Requests with an observer token.
    Observer,
}

impl RouteClass {
    /// Returns the cost of a request in units.
    #[must_use]
    pub const fn cost(self) -> u32 {
        match self {
            Self::ChannelMessage | Self::DirectMessage => 12,
            Self::GroupConversation | Self::Presence => MAX_COST,
            Self::Reaction => 15,
            Self::Plain | Self::WorkspaceInfo | Self::Signal | Self::Observer => UNITS_PER_REQUEST,
        }
    }

    /// Returns the bucket that the request is charged to.
    #[must_use]
    pub const fn bucket(self) -> Bucket {
        match self {
            Self::WorkspaceInfo => Bucket::WorkspaceInfo,
            Self::Signal => Bucket::Signals,
            Self::Observer => Bucket::Observers,
            Self::Plain
            | Self::ChannelMessage
            | Self::DirectMessage
            | Self::GroupConversation
            | Self::Reaction
            | Self::Presence => Bucket::Requests,
        }
    }
}

/// Independent rate limits of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// Requests of agents, nodes and the workspace key.
    Requests,
    /// Reads of the workspace itself.
    WorkspaceInfo,
    /// Reports of brokers. Ten times the limit of the plan.
    Signals,
    /// Requests with observer tokens.
    Observers,
}

impl Bucket {
    /// Returns the name used in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::WorkspaceInfo => "workspace",
            Self::Signals => "signals",
            Self::Observers => "observers",
        }
    }

    /// Returns the units per window under a plan with this many requests a minute.
    #[must_use]
    pub const fn units_per_window(self, requests_per_minute: u32) -> u32 {
        let factor = match self {
            Self::Signals => 10,
            Self::Requests | Self::WorkspaceInfo | Self::Observers => 1,
        };
        requests_per_minute.saturating_mul(factor).saturating_mul(UNITS_PER_REQUEST)
    }
}

/// Returns the part of a workspace's limit that one caller may use: half, so that a single caller cannot exhaust it.
#[must_use]
pub const fn caller_share(limit: u32) -> u32 {
    limit / 2
}

/// Returns the units that one caller may spend at once: half of its share.
#[must_use]
pub fn caller_burst(share: u32) -> u32 {
    // A smaller burst would refuse the most expensive request for ever.
    (share / 2).max(MAX_COST)
}

/// Returns the window that contains `unix_seconds`, and the second at which it ends. Windows of different workspaces
/// start at different seconds, so that their first batches are not acquired all at once.
#[must_use]
pub const fn window_at(workspace: i64, unix_seconds: i64) -> (i64, i64) {
    let shift = workspace.rem_euclid(WINDOW_SECONDS);
    let window = (unix_seconds - shift).div_euclid(WINDOW_SECONDS);
    (window, (window + 1) * WINDOW_SECONDS + shift)
}

/// Outcome of charging a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// The request was charged.
    Accepted,
    /// Units must be acquired first; see [`Lease::units_to_acquire`].
    AcquireFirst,
    /// The limit of this window is exhausted.
    Exhausted,
}

/// Part of one rate limit that one gateway holds in the current window.
#[derive(Debug, Clone)]
pub struct Lease {
    limit: u32,
    window: i64,
    /// Units spent by this gateway.
    used: u32,
    /// Units acquired from the row.
    acquired: u32,
    /// Units that may be spent before they are acquired: the advance units, or more while storage is unavailable.
    advance: u32,
    /// `true` if the row had fewer units than requested.
    exhausted: bool,
    /// Units acquired by all gateways, as of the last answer.
    acquired_by_all: u32,
    /// Units acquired here in the previous window.
    acquired_before: u32,
}

impl Lease {
    /// Creates a lease without acquired units for a limit of `limit` units per window.
    #[must_use]
    pub fn new(limit: u32, window: i64) -> Self {
        Self {
            limit,
            window,
            used: 0,
            acquired: 0,
            advance: advance_units(limit),
            exhausted: false,
            acquired_by_all: 0,
            acquired_before: 0,
        }
    }

    /// Starts a new window if it is time, and adopts a changed limit.
    pub fn roll_window(&mut self, limit: u32, window: i64) {
        // Only forwards: a caller may have read the clock before another one started the new window.
        if window > self.window {
            // Demand of a window that is longer ago says nothing about this one.
            let before = if window == self.window + 1 { self.acquired } else { 0 };
            *self = Self { acquired_before: before, ..Self::new(limit, window) };
        } else if limit != self.limit {
            // Spent and acquired units stay; otherwise each change of the limit would grant them again.
            *self = Self { limit, exhausted: false, advance: advance_units(limit), ..self.clone() };
        }
    }

    /// Charges a request of `cost` units.
    pub fn charge(&mut self, cost: u32) -> Charge {
        if self.used.saturating_add(cost) <= self.spendable() {
            self.used += cost;
            return Charge::Accepted;
        }
        if self.exhausted { Charge::Exhausted } else { Charge::AcquireFirst }
    }

    /// Refunds a request that was refused for another reason.
    pub fn refund(&mut self, cost: u32) {
        self.used = self.used.saturating_sub(cost);
    }

    /// Returns the number of units to acquire now, ahead of use; 0 for none.
    #[must_use]
    pub fn units_to_acquire(&self) -> u32 {
        // Below half a batch the next one is acquired in the background, before requests have to wait for it.
        let plenty = self.spendable().saturating_sub(self.used) >= batch_units(self.limit) / 2;
        // Up to half of the advance units, traffic causes no writes.
        let light = self.used <= advance_units(self.limit) / 2;
        if self.exhausted || plenty || light { 0 } else { self.next_batch_units() }
    }

    /// Returns the size of the next batch, including units that were spent in advance.
    #[must_use]
    pub fn next_batch_units(&self) -> u32 {
        batch_units(self.limit) + self.used.saturating_sub(self.acquired)
    }

    /// Records that the row granted `got` of `wanted` units for `window`, and that all gateways have acquired
    /// `acquired_by_all`.
    pub fn record_acquired(&mut self, window: i64, wanted: u32, got: u32, acquired_by_all: u32) {
        // An answer for an earlier window is obsolete.
        if window == self.window {
            self.acquired = self.acquired.saturating_add(got);
            self.acquired_by_all = acquired_by_all;
            self.exhausted = got < wanted;
        }
    }

    /// Allows the units of the previous window, or at least one batch, to be spent while storage is unavailable. They
    /// are acquired afterwards if storage comes back within the window.
    pub fn on_storage_unavailable(&mut self) {
        self.advance = self.advance.max(self.acquired_before).max(self.acquired).max(batch_units(self.limit));
    }

    /// Returns the units that are still available in this window, as of the last answer: later acquisitions of other
    /// gateways are unknown.
    #[must_use]
    pub fn remaining(&self) -> u32 {
        let own = self.spendable().saturating_sub(self.used);
        if self.exhausted { own } else { own.max(self.unacquired_units()) }
    }

    fn unacquired_units(&self) -> u32 {
        let not_taken = self.used.saturating_sub(self.acquired);
        let unspent = self.acquired.saturating_sub(self.used);
        self.limit.saturating_sub(self.acquired_by_all).saturating_sub(not_taken).saturating_add(unspent)
    }

    fn spendable(&self) -> u32 {
        self.acquired.max(self.advance)
    }
}

/// Returns the units that the row grants: at most `wanted`, and no more than are left after the `acquired` units of
/// this window.
#[must_use]
pub const fn grant_units(limit: u32, acquired: u32, wanted: u32) -> u32 {
    let left = limit.saturating_sub(acquired);
    if wanted < left { wanted } else { left }
}

/// Returns the units that a gateway may spend in a window before it has acquired any.
#[must_use]
pub fn advance_units(limit: u32) -> u32 {
    (limit / ADVANCE_DIVISOR).max(MAX_COST)
}

fn batch_units(limit: u32) -> u32 {
    (limit / BATCHES).max(MAX_COST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn costs_are_the_documented_multipliers() {
        for (class, percent) in [
            (RouteClass::Plain, 100),
            (RouteClass::ChannelMessage, 50),
            (RouteClass::DirectMessage, 50),
            (RouteClass::GroupConversation, 30),
            (RouteClass::Reaction, 40),
            (RouteClass::Presence, 30),
            (RouteClass::WorkspaceInfo, 100),
            (RouteClass::Observer, 100),
        ] {
            let requests = class.bucket().units_per_window(300) / class.cost();
            assert_eq!(requests, 300 * percent / 100, "{class:?}");
        }
    }

    #[test]
    fn windows_of_workspaces_start_at_different_seconds() {
        assert_eq!(window_at(0, 119), (1, 120));
        assert_eq!(window_at(0, 120), (2, 180));
        assert_eq!(window_at(61, 120), (1, 121));
        assert_eq!(window_at(61, 121), (2, 181));
    }

    #[test]
    fn light_traffic_acquires_nothing() {
        let mut lease = Lease::new(Bucket::Requests.units_per_window(300), 0);
        for _ in 0..4 {
            assert_eq!(lease.charge(RouteClass::Plain.cost()), Charge::Accepted);
            assert_eq!(lease.units_to_acquire(), 0);
        }
    }

    #[test]
    fn a_changed_limit_applies_within_the_window() {
        let mut lease = Lease::new(600, 7);
        lease.record_acquired(7, 600, 500, 500);
        while lease.charge(6) == Charge::Accepted {}
        assert_eq!(lease.charge(6), Charge::Exhausted);
        lease.roll_window(1200, 7);
        assert_eq!(lease.charge(6), Charge::AcquireFirst);
    }

    #[test]
    fn without_storage_the_previous_units_remain_available() {
        let mut lease = Lease::new(6000, 1);
        lease.record_acquired(1, 3000, 3000, 3000);
        lease.roll_window(6000, 2);
        lease.on_storage_unavailable();
        let paid = (0..2000).filter(|_| lease.charge(6) == Charge::Accepted).count();
        assert_eq!(paid, 500);
        lease.roll_window(6000, 3);
        assert_eq!(lease.charge(6), Charge::Accepted);
    }

    /// Events at one gateway.
    #[derive(Debug, Clone)]
    enum Step {
        /// A request with the cost of a route class arrives at a gateway.
        Request(usize, u32),
        /// The row answers the oldest acquisition in progress.
        Answer,
        /// The row granted units, and its answer was lost.
        Lost,
        /// The window ends.
        Minute,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            200 => (0..3_usize, prop::sample::select(vec![6_u32, 12, 15, 20])).prop_map(|(at, cost)| Step::Request(at, cost)),
            80 => Just(Step::Answer),
            2 => Just(Step::Lost),
            1 => Just(Step::Minute),
        ]
    }

    proptest! {
        /// In every window three gateways stay within the limit plus their advance units, for any order of requests,
        /// answers and losses.
        #[test]
        fn gateways_stay_within_the_limit(limit in 60_u32..5000, steps in prop::collection::vec(step(), 1..2000)) {
            let mut gateways = vec![Lease::new(limit, 0); 3];
            let mut in_progress: std::collections::VecDeque<(usize, i64, u32)> = std::collections::VecDeque::new();
            let (mut now, mut row, mut paid) = (0_i64, (0_i64, 0_u32), 0_u32);
            for step in steps {
                match step {
                    Step::Request(at, cost) => {
                        let lease = &mut gateways[at];
                        lease.roll_window(limit, now);
                        let charged = lease.charge(cost);
                        if charged == Charge::Accepted {
                            paid += cost;
                        }
                        let wanted = if charged == Charge::AcquireFirst { lease.next_batch_units() } else { lease.units_to_acquire() };
                        if wanted > 0 && !in_progress.iter().any(|(gateway, ..)| *gateway == at) {
                            in_progress.push_back((at, now, wanted));
                        }
                    }
                    Step::Answer | Step::Lost => {
                        let Some((at, window, wanted)) = in_progress.pop_front() else { continue };
                        if window > row.0 {
                            row = (window, 0);
                        }
                        let got = if window == row.0 { grant_units(limit, row.1, wanted) } else { 0 };
                        row.1 += got;
                        if matches!(step, Step::Answer) {
                            gateways[at].record_acquired(window, wanted, got, row.1);
                        }
                    }
                    Step::Minute => {
                        now += 1;
                        paid = 0;
                    }
                }
                prop_assert!(paid <= limit + 3 * advance_units(limit), "{paid} of {limit}");
            }
        }

        /// A single gateway gets the whole limit, and learns in time that it is exhausted.
        #[test]
        fn a_single_gateway_gets_the_whole_limit(limit in 60_u32..20_000, cost in prop::sample::select(vec![6_u32, 12, 15, 20])) {
            let (mut lease, mut row, mut paid) = (Lease::new(limit, 0), 0, 0);
            loop {
                match lease.charge(cost) {
                    Charge::Accepted => paid += cost,
                    Charge::Exhausted => break,
                    Charge::AcquireFirst => {
                        let wanted = lease.next_batch_units();
                        let got = grant_units(limit, row, wanted);
                        row += got;
                        lease.record_acquired(0, wanted, got, row);
                    }
                }
                prop_assert!(lease.remaining() <= limit);
            }
            prop_assert!(paid + cost > limit && paid <= limit + advance_units(limit), "{paid} of {limit}");
            prop_assert!(lease.remaining() < cost);
        }
    }
}
