//! Placement of work on nodes: filter, score and choose, with a reason for every node that was skipped.
//!
//! Pure: candidates and a request go in, a decision comes out, and randomness comes in as a number. The engine reads
//! the candidates and the store reserves the choice; neither evaluates a node itself.
//!
//! Heartbeats are seconds old, so the measured load lags behind. Reservations therefore count as load, and equally
//! loaded nodes are chosen at random. Concurrent placements do not matter here: the store reserves under a lock of the
//! workspace (ADR 0011).

use std::cmp::Ordering;

use crate::{NodeId, ProviderName};

/// Assumed load of one reservation on a node without a limit. Only affects the order of nodes.
const SHARE_WITHOUT_LIMIT: f64 = 1.0 / 32.0;

/// Snapshot of a node that may take the work.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub node_id: NodeId,
    /// Name of its provider that would handle the work.
    pub provider_id: Option<ProviderName>,
    /// `true` if it advertises the required capability.
    pub capable: bool,
    /// `true` if it is connected and its last heartbeat is within the liveness time.
    pub live: bool,
    /// `true` if an operator drains the node: it gets no new work.
    pub draining: bool,
    /// `true` if it reports that its handlers run.
    pub handlers_live: bool,
    /// Number of running agents, as last reported.
    pub active: u32,
    /// Number of reservations for work that is being placed.
    pub reserved: u32,
    /// Maximum number of agents; 0 means unlimited.
    pub max: u32,
    /// Load from 0 to 1 if the node measures it.
    pub load: Option<f64>,
    /// `true` if an earlier attempt of this work failed there. Chosen only if no other candidate is eligible.
    pub avoided: bool,
}

impl Candidate {
    /// Returns the number of running and reserved agents.
    #[must_use]
    pub const fn expected_agents(&self) -> u32 {
        self.active.saturating_add(self.reserved)
    }

    /// Returns whether the node has no room for another agent.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.max != 0 && self.expected_agents() >= self.max
    }

    /// Returns the measured load plus the assumed load of the reservations.
    fn expected_load(&self) -> Option<f64> {
        let share = if self.max == 0 { SHARE_WITHOUT_LIMIT } else { 1.0 / f64::from(self.max) };
        // A node reports its load itself: a value out of range must not attract all work.
        self.load.map(|load| load.clamp(0.0, 1.0) + f64::from(self.reserved) * share)
    }

    /// Orders by load: measured before unmeasured, lower first, then by agent count (docs/protocol/node.md,
    /// "Placement"). Equal candidates are equally good.
    fn compare(&self, other: &Self) -> Ordering {
        let by_load = match (self.expected_load(), other.expected_load()) {
            (Some(mine), Some(theirs)) => mine.total_cmp(&theirs),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => Ordering::Equal,
        };
        by_load.then_with(|| self.expected_agents().cmp(&other.expected_agents()))
    }

    /// Returns the reason for which the candidate cannot take the work. Permanent reasons come before temporary ones.
    fn skip_reason(&self, request: &PlacementRequest) -> Option<SkipReason> {
        let is_targeted = match &request.target {
            PlacementTarget::Any => true,
            PlacementTarget::Node(node) => *node == self.node_id,
            PlacementTarget::Provider(node, provider) => {
                *node == self.node_id && self.provider_id.as_ref() == Some(provider)
            }
        };
        let reasons = [
            (!is_targeted, SkipReason::NotTargeted),
            (!self.capable, SkipReason::LacksCapability),
            (self.draining, SkipReason::Draining),
            (!self.live, SkipReason::NotLive),
            (!self.handlers_live, SkipReason::HandlersNotLive),
            (self.is_full(), SkipReason::Full),
        ];
        reasons.into_iter().find_map(|(applies, reason)| applies.then_some(reason))
    }
}

/// Work to place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Nodes that may take the work.
    pub target: PlacementTarget,
}

/// Nodes that may take a piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlacementTarget {
    /// Any capable node.
    Any,
    /// Only the node with this id. The caller resolves `self` to an id first.
    Node(NodeId),
    /// Only this provider of this node, because other providers cannot finish work that it began.
    Provider(NodeId, ProviderName),
}

/// Reason for which a node was not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// The node does not advertise the capability.
    LacksCapability,
    /// The node is not connected, or its last heartbeat is too old.
    NotLive,
    /// An operator drains the node.
    Draining,
    /// The node is connected and reports that its handlers do not run.
    HandlersNotLive,
    /// The node has its maximum number of running and reserved agents.
    Full,
    /// An earlier attempt failed there, and another node is eligible.
    Avoided,
    /// The work is for another node.
    NotTargeted,
}

impl SkipReason {
    /// Returns the name used in storage and in answers.
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

/// Chosen candidate, and the reasons for the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementDecision {
    /// Index of the chosen candidate; `None` if there is no eligible one.
    pub chosen: Option<usize>,
    /// Ineligible nodes with their reasons, in the order of the candidates. Eligible nodes that were not chosen are not
    /// listed.
    pub skipped: Vec<(NodeId, SkipReason)>,
}

/// Places work. The same arguments give the same decision; pass a new `entropy` value for each call.
#[must_use]
pub fn place(candidates: &[Candidate], request: &PlacementRequest, entropy: u64) -> PlacementDecision {
    let mut skipped = Vec::new();
    let mut avoided = Vec::new();
    let mut eligible = Vec::with_capacity(candidates.len());
    for (at, candidate) in candidates.iter().enumerate() {
        match candidate.skip_reason(request) {
            Some(reason) => skipped.push((at, reason)),
            None if candidate.avoided => avoided.push(at),
            None => eligible.push(at),
        }
    }
    if eligible.is_empty() {
        eligible = avoided;
    } else if !avoided.is_empty() {
        skipped.extend(avoided.into_iter().map(|at| (at, SkipReason::Avoided)));
        skipped.sort_unstable_by_key(|(at, _)| *at);
    }
    let chosen = choose_least_loaded(candidates, &eligible, entropy);
    let skipped = skipped.into_iter().map(|(at, reason)| (candidates[at].node_id.clone(), reason));
    PlacementDecision { chosen, skipped: skipped.collect() }
}

/// Chooses at random among the least loaded candidates.
fn choose_least_loaded(candidates: &[Candidate], eligible: &[usize], entropy: u64) -> Option<usize> {
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
    choose_evenly(&ties, entropy)
}

/// Chooses one of these with equal probability.
fn choose_evenly(among: &[usize], entropy: u64) -> Option<usize> {
    // The upper half of the product is an even choice without division; mixing makes counters good enough.
    let drawn = (u128::from(mix(entropy)) * u128::try_from(among.len()).ok()?) >> 64;
    among.get(usize::try_from(drawn).ok()?).copied()
}

/// Mixes the bits with the finaliser of splitmix64 (Steele, Lea, Flood 2014), so that consecutive numbers differ
/// widely.
const fn mix(entropy: u64) -> u64 {
    let z = entropy.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
