//! Request budgets: what a request costs, and how gateways share a minute's budget by leases.
//!
//! A budget is a number of units a minute, kept in one row of storage. A gateway takes units from it in
//! batches, ahead of use, and spends them from memory. Units that were not spent lapse with their minute.
//!
//! In one minute a gateway lets through what it took, or, before it has taken anything, its small
//! *allowance*: so that a workspace with little traffic costs storage nothing. All gateways together stay
//! within the budget plus one allowance each.

/// How long a budget lasts, in seconds.
pub const WINDOW_SECONDS: i64 = 60;
/// What a plain request costs. Divisible by the parts that the contract's multipliers need.
pub const UNITS_PER_REQUEST: u32 = 6;
/// A budget is taken in this many batches.
const BATCHES: u32 = 16;
/// The allowance is this part of a budget.
const ALLOWANCES: u32 = 32;
/// The dearest request must fit into an allowance.
const DEAREST: u32 = 20;

/// Routes with the same price and budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Most of them.
    Plain,
    /// Posting to a channel: half the rate.
    ChannelMessage,
    /// `POST /v1/dm`: half the rate.
    DirectMessage,
    /// `POST /v1/dm/group`: 0.3 of the rate.
    GroupConversation,
    /// Reacting: 0.4 of the rate.
    Reaction,
    /// Reading everybody's presence: 0.3 of the rate.
    Presence,
    /// `GET /v1/workspace`.
    WorkspaceInfo,
    /// Session events and reads, which brokers report several times a second.
    Signal,
    /// Whatever an observer token asks for.
    Observer,
}

impl Family {
    /// Units.
    #[must_use]
    pub const fn cost(self) -> u32 {
        match self {
            Self::ChannelMessage | Self::DirectMessage => 12,
            Self::GroupConversation | Self::Presence => DEAREST,
            Self::Reaction => 15,
            Self::Plain | Self::WorkspaceInfo | Self::Signal | Self::Observer => UNITS_PER_REQUEST,
        }
    }

    /// From which budget.
    #[must_use]
    pub const fn bucket(self) -> Bucket {
        match self {
            Self::WorkspaceInfo => Bucket::WorkspaceInfo,
            Self::Signal => Bucket::Signals,
            Self::Observer => Bucket::Observers,
            _ => Bucket::Requests,
        }
    }
}

/// A workspace's budgets. They do not touch each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// What agents, nodes and the workspace key do.
    Requests,
    /// Looking at the workspace itself.
    WorkspaceInfo,
    /// What brokers report. Ten times the plan's budget.
    Signals,
    /// What observers read.
    Observers,
}

impl Bucket {
    /// Its name in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::WorkspaceInfo => "workspace",
            Self::Signals => "signals",
            Self::Observers => "observers",
        }
    }

    /// Units a minute under a plan with that many requests a minute.
    #[must_use]
    pub const fn budget(self, requests_per_minute: u32) -> u32 {
        let factor = match self {
            Self::Signals => 10,
            _ => 1,
        };
        requests_per_minute.saturating_mul(factor).saturating_mul(UNITS_PER_REQUEST)
    }
}

/// What one caller may use of a workspace's budget: half, so that nobody uses it up alone.
#[must_use]
pub const fn share_of_one(budget: u32) -> u32 {
    budget / 2
}

/// What one caller may spend at once: half of its part.
#[must_use]
pub fn burst_of_one(share: u32) -> u32 {
    (share / 2).max(DEAREST)
}

/// The minute that `unix_seconds` is in, and the second at which it ends. Workspaces begin their minutes at
/// different seconds, so that they do not all come for their first batch at once.
#[must_use]
pub const fn window(workspace: i64, unix_seconds: i64) -> (i64, i64) {
    let shift = workspace.rem_euclid(WINDOW_SECONDS);
    let window = (unix_seconds - shift).div_euclid(WINDOW_SECONDS);
    (window, (window + 1) * WINDOW_SECONDS + shift)
}

/// What became of charging a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// It is paid for.
    Paid,
    /// Units must be taken first; see [`Lease::wanted`].
    TakeFirst,
    /// The budget of this minute is used up.
    UsedUp,
}

/// One gateway's part of one budget in the current minute.
#[derive(Debug, Clone)]
pub struct Lease {
    budget: u32,
    window: i64,
    /// Units spent here.
    used: u32,
    /// Units taken from the row.
    taken: u32,
    /// What may be spent without having been taken: the allowance, or more while storage is away.
    advance: u32,
    /// The row had less than was wanted.
    dry: bool,
    /// What all gateways have taken, as last heard.
    taken_by_all: u32,
    /// What was taken here in the minute before.
    taken_before: u32,
}

impl Lease {
    /// Nothing taken yet, of so many units a minute.
    #[must_use]
    pub fn new(budget: u32, window: i64) -> Self {
        Self {
            budget,
            window,
            used: 0,
            taken: 0,
            advance: allowance(budget),
            dry: false,
            taken_by_all: 0,
            taken_before: 0,
        }
    }

    /// Begins another minute if it is time, and adopts a changed budget.
    pub fn turn(&mut self, budget: u32, window: i64) {
        if window > self.window {
            let before = if window == self.window + 1 { self.taken } else { 0 };
            *self = Self { taken_before: before, ..Self::new(budget, window) };
        } else if budget != self.budget {
            *self = Self { budget, dry: false, advance: allowance(budget), ..self.clone() };
        }
    }

    /// Charges a request of `cost` units.
    pub fn charge(&mut self, cost: u32) -> Charge {
        if self.used.saturating_add(cost) <= self.spendable() {
            self.used += cost;
            return Charge::Paid;
        }
        if self.dry { Charge::UsedUp } else { Charge::TakeFirst }
    }

    /// Gives back what a request paid that was refused for another reason.
    pub fn refund(&mut self, cost: u32) {
        self.used = self.used.saturating_sub(cost);
    }

    /// How many units should be taken now, ahead of use; 0 for none.
    #[must_use]
    pub fn wanted(&self) -> u32 {
        let plenty = self.spendable().saturating_sub(self.used) >= batch(self.budget) / 2;
        let light = self.used <= allowance(self.budget) / 2;
        if self.dry || plenty || light { 0 } else { self.next_batch() }
    }

    /// What is taken next: a batch, and what was spent in advance.
    #[must_use]
    pub fn next_batch(&self) -> u32 {
        batch(self.budget) + self.used.saturating_sub(self.taken)
    }

    /// The row gave `got` of `wanted` units for `window`; all gateways have now taken `taken_by_all`.
    pub fn took(&mut self, window: i64, wanted: u32, got: u32, taken_by_all: u32) {
        // An answer that comes after its minute has no worth.
        if window == self.window {
            self.taken = self.taken.saturating_add(got);
            self.taken_by_all = taken_by_all;
            self.dry = got < wanted;
        }
    }

    /// Storage is away. What was taken in the minute before goes on, a batch at least, once a minute. What
    /// is spent of it is taken later, if storage comes back within the minute.
    pub fn storage_is_away(&mut self) {
        self.advance = self.advance.max(self.taken_before).max(self.taken).max(batch(self.budget));
    }

    /// Units that can still be spent in this minute as far as known here: what others took since the last
    /// answer is not.
    #[must_use]
    pub fn remaining(&self) -> u32 {
        let own = self.spendable().saturating_sub(self.used);
        if self.dry { own } else { own.max(self.left_of_budget()) }
    }

    fn left_of_budget(&self) -> u32 {
        let not_taken = self.used.saturating_sub(self.taken);
        let unspent = self.taken.saturating_sub(self.used);
        self.budget.saturating_sub(self.taken_by_all).saturating_sub(not_taken).saturating_add(unspent)
    }

    fn spendable(&self) -> u32 {
        self.taken.max(self.advance)
    }
}

/// What the row of a budget gives: `wanted` units at most, and no more than are left. `taken` are those
/// taken in this minute.
#[must_use]
pub const fn give(budget: u32, taken: u32, wanted: u32) -> u32 {
    let left = budget.saturating_sub(taken);
    if wanted < left { wanted } else { left }
}

/// What a gateway lets through in a minute before it has taken anything.
#[must_use]
pub fn allowance(budget: u32) -> u32 {
    (budget / ALLOWANCES).max(DEAREST)
}

fn batch(budget: u32) -> u32 {
    (budget / BATCHES).max(DEAREST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prices_are_the_contracts_multipliers() {
        for (family, multiplier) in [
            (Family::Plain, 1.0),
            (Family::ChannelMessage, 0.5),
            (Family::DirectMessage, 0.5),
            (Family::GroupConversation, 0.3),
            (Family::Reaction, 0.4),
            (Family::Presence, 0.3),
            (Family::WorkspaceInfo, 1.0),
            (Family::Observer, 1.0),
        ] {
            let requests = family.bucket().budget(300) / family.cost();
            assert_eq!(requests, (300.0 * multiplier) as u32, "{family:?}");
        }
    }

    #[test]
    fn a_minute_begins_at_the_workspaces_own_second() {
        assert_eq!(window(0, 119), (1, 120));
        assert_eq!(window(0, 120), (2, 180));
        assert_eq!(window(61, 120), (1, 121));
        assert_eq!(window(61, 121), (2, 181));
    }

    #[test]
    fn light_traffic_takes_nothing() {
        let mut lease = Lease::new(Bucket::Requests.budget(300), 0);
        for _ in 0..4 {
            assert_eq!(lease.charge(Family::Plain.cost()), Charge::Paid);
            assert_eq!(lease.wanted(), 0);
        }
    }

    #[test]
    fn a_changed_budget_counts_within_the_minute() {
        let mut lease = Lease::new(600, 7);
        lease.took(7, 600, 500, 500);
        while lease.charge(6) == Charge::Paid {}
        assert_eq!(lease.charge(6), Charge::UsedUp);
        lease.turn(1200, 7);
        assert_eq!(lease.charge(6), Charge::TakeFirst);
    }

    #[test]
    fn without_storage_the_last_share_goes_on() {
        let mut lease = Lease::new(6000, 1);
        lease.took(1, 3000, 3000, 3000);
        lease.turn(6000, 2);
        lease.storage_is_away();
        let paid = (0..2000).filter(|_| lease.charge(6) == Charge::Paid).count();
        assert_eq!(paid, 500);
        lease.turn(6000, 3);
        assert_eq!(lease.charge(6), Charge::Paid);
    }

    /// What happens at one gateway.
    #[derive(Debug, Clone)]
    enum Step {
        /// A request of a family's cost comes to a gateway.
        Request(usize, u32),
        /// The row answers the oldest taking under way.
        Answer,
        /// The row gave, and its answer was lost.
        Lost,
        /// A minute ends.
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
        /// Whatever the order of requests, answers and losses: three gateways stay within the budget and
        /// an allowance each, in every minute.
        #[test]
        fn gateways_stay_within_the_budget(budget in 60_u32..5000, steps in prop::collection::vec(step(), 1..2000)) {
            let mut gateways = vec![Lease::new(budget, 0); 3];
            let mut under_way: std::collections::VecDeque<(usize, i64, u32)> = std::collections::VecDeque::new();
            let (mut now, mut row, mut paid) = (0_i64, (0_i64, 0_u32), 0_u32);
            for step in steps {
                match step {
                    Step::Request(at, cost) => {
                        let lease = &mut gateways[at];
                        lease.turn(budget, now);
                        let charged = lease.charge(cost);
                        if charged == Charge::Paid {
                            paid += cost;
                        }
                        let wanted = if charged == Charge::TakeFirst { lease.next_batch() } else { lease.wanted() };
                        if wanted > 0 && !under_way.iter().any(|(gateway, ..)| *gateway == at) {
                            under_way.push_back((at, now, wanted));
                        }
                    }
                    Step::Answer | Step::Lost => {
                        let Some((at, window, wanted)) = under_way.pop_front() else { continue };
                        if window > row.0 {
                            row = (window, 0);
                        }
                        let got = if window == row.0 { give(budget, row.1, wanted) } else { 0 };
                        row.1 += got;
                        if matches!(step, Step::Answer) {
                            gateways[at].took(window, wanted, got, row.1);
                        }
                    }
                    Step::Minute => {
                        now += 1;
                        paid = 0;
                    }
                }
                prop_assert!(paid <= budget + 3 * allowance(budget), "{paid} of {budget}");
            }
        }

        /// A gateway alone gets the whole budget, and is told in time that it is used up.
        #[test]
        fn a_gateway_alone_gets_all_of_it(budget in 60_u32..20_000, cost in prop::sample::select(vec![6_u32, 12, 15, 20])) {
            let (mut lease, mut row, mut paid) = (Lease::new(budget, 0), 0, 0);
            loop {
                match lease.charge(cost) {
                    Charge::Paid => paid += cost,
                    Charge::UsedUp => break,
                    Charge::TakeFirst => {
                        let wanted = lease.next_batch();
                        let got = give(budget, row, wanted);
                        row += got;
                        lease.took(0, wanted, got, row);
                    }
                }
                prop_assert!(lease.remaining() <= budget);
            }
            prop_assert!(paid + cost > budget && paid <= budget + allowance(budget), "{paid} of {budget}");
            prop_assert!(lease.remaining() < cost);
        }
    }
}
