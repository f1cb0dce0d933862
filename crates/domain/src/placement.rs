//! Which node does a piece of work: filter, score, choose, with a reason for every node that could not.
//!
//! Pure: candidates and a request go in, a decision comes out, and chance comes in as a number. The engine reads the
//! candidates and the store reserves the choice; neither judges a node by itself.
//!
//! What is read is never quite true: heartbeats are seconds old. So reservations count as load, and nodes that look
//! equal are drawn by lot. Other placements are no concern: the store reserves under a lock of the workspace (ADR 0011).

use std::cmp::Ordering;

/// What one more reservation adds to the measured load of a node without a limit: a 32nd. Only the order of nodes
/// depends on it.
const SHARE_WITHOUT_LIMIT: f64 = 1.0 / 32.0;

/// A node as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The node.
    pub node_id: String,
    /// Its provider that would handle the work.
    pub provider_id: Option<String>,
    /// It advertises the capability that the work needs.
    pub capable: bool,
    /// Connected, and heard of within the liveness time.
    pub live: bool,
    /// An operator empties it: nothing new goes there.
    pub draining: bool,
    /// It says that its handlers run.
    pub handlers_live: bool,
    /// Agents that it runs, as last reported.
    pub active: u32,
    /// Places promised to work that is on its way.
    pub reserved: u32,
    /// Agents that it may run; 0 is no limit.
    pub max: u32,
    /// Its load from 0 to 1 if it measures it.
    pub load: Option<f64>,
    /// It has failed at this work before: taken only if nobody else can.
    pub avoided: bool,
}

impl Candidate {
    /// Agents that run there or soon will.
    #[must_use]
    pub const fn fill(&self) -> u32 {
        self.active.saturating_add(self.reserved)
    }

    /// Whether it has no room for one more.
    #[must_use]
    pub const fn full(&self) -> bool {
        self.max != 0 && self.fill() >= self.max
    }

    /// Its measured load, and what the reservations will add to it.
    fn expected_load(&self) -> Option<f64> {
        let share = if self.max == 0 { SHARE_WITHOUT_LIMIT } else { 1.0 / f64::from(self.max) };
        self.load.map(|load| load.clamp(0.0, 1.0) + f64::from(self.reserved) * share)
    }

    /// Measured loads first, lower first, then fewer agents (contract, node.md 8.4). Equal means: equally good.
    fn compare(&self, other: &Self) -> Ordering {
        let by_load = match (self.expected_load(), other.expected_load()) {
            (Some(mine), Some(theirs)) => mine.total_cmp(&theirs),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => Ordering::Equal,
        };
        by_load.then_with(|| self.fill().cmp(&other.fill()))
    }

    /// Why it cannot do the work at all. What will not change comes before what may.
    fn obstacle(&self, request: &Request) -> Option<Skip> {
        match &request.target {
            Target::Node(target) if *target != self.node_id => Some(Skip::NotTargeted),
            Target::Provider(node, provider)
                if *node != self.node_id || self.provider_id.as_deref() != Some(provider.as_str()) =>
            {
                Some(Skip::NotTargeted)
            }
            _ if !self.capable => Some(Skip::LacksCapability),
            _ if self.draining => Some(Skip::Draining),
            _ if !self.live => Some(Skip::NotLive),
            _ if !self.handlers_live => Some(Skip::HandlersNotLive),
            _ if self.full() => Some(Skip::Full),
            _ => None,
        }
    }
}

/// What is to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Where it may go.
    pub target: Target,
}

/// Where work may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// To any node that can do it.
    Any,
    /// To the node with this id only. `self` has been made one of these by the caller.
    Node(String),
    /// To this provider of that node only: what it has begun, no other can end.
    Provider(String, String),
}

/// Why a node was not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// It does not advertise the capability.
    LacksCapability,
    /// Not connected, or silent for too long.
    NotLive,
    /// An operator empties it.
    Draining,
    /// Connected, and says that its handlers do not run.
    HandlersNotLive,
    /// As many agents as it may run, counting those on their way.
    Full,
    /// It failed at this work before, and another node can do it.
    Avoided,
    /// The work is for another node.
    NotTargeted,
}

impl Skip {
    /// The word that is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LacksCapability => "lacks_capability",
            Self::NotLive => "not_live",
            Self::Draining => "draining",
            Self::HandlersNotLive => "handlers_not_live",
            Self::Full => "full",
            Self::Avoided => "avoided",
            Self::NotTargeted => "not_targeted",
        }
    }
}

/// Who does it, and why the others do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Index of the chosen candidate; `None` if nobody can.
    pub chosen: Option<usize>,
    /// The nodes that could not, with the reason, in the order of the candidates. Nodes that could have and were more
    /// loaded are not in it.
    pub skipped: Vec<(String, Skip)>,
}

/// Places work. The same arguments give the same answer; `entropy` should be new for each call.
#[must_use]
pub fn place(candidates: &[Candidate], request: &Request, entropy: u64) -> Decision {
    let mut skipped = Vec::new();
    let mut avoided = Vec::new();
    let mut eligible = Vec::with_capacity(candidates.len());
    for (at, candidate) in candidates.iter().enumerate() {
        match candidate.obstacle(request) {
            Some(reason) => skipped.push((at, reason)),
            None if candidate.avoided => avoided.push(at),
            None => eligible.push(at),
        }
    }
    if eligible.is_empty() {
        eligible = avoided;
    } else if !avoided.is_empty() {
        skipped.extend(avoided.into_iter().map(|at| (at, Skip::Avoided)));
        skipped.sort_unstable_by_key(|(at, _)| *at);
    }
    let chosen = least(candidates, &eligible, entropy);
    let skipped = skipped.into_iter().map(|(at, reason)| (candidates[at].node_id.clone(), reason));
    Decision { chosen, skipped: skipped.collect() }
}

/// One of the least loaded, by lot.
fn least(candidates: &[Candidate], eligible: &[usize], entropy: u64) -> Option<usize> {
    let mut ties: Vec<usize> = Vec::new();
    for &at in eligible {
        match ties.first().map_or(Ordering::Less, |&best| candidates[at].compare(&candidates[best])) {
            Ordering::Less => {
                ties.clear();
                ties.push(at);
            }
            Ordering::Equal => ties.push(at),
            Ordering::Greater => {}
        }
    }
    draw(&ties, entropy)
}

/// One of these, evenly.
fn draw(among: &[usize], entropy: u64) -> Option<usize> {
    // The upper half of a product is an even draw without a division; the mixing makes counters good enough.
    let drawn = (u128::from(mix(entropy)) * u128::try_from(among.len()).ok()?) >> 64;
    among.get(usize::try_from(drawn).ok()?).copied()
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014): neighbouring numbers come out unlike.
const fn mix(entropy: u64) -> u64 {
    let z = entropy.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
