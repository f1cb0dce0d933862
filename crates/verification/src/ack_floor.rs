//! [`AckFloor`]: up to which message an agent's mailbox may be acknowledged.

use std::collections::BTreeSet;

/// The cumulative ack of one agent: the highest `seq` such that it and everything below it is settled.
///
/// A message is settled when it was verified, closed by the policy for unverified ones, or when its failure was
/// reported; messages that no program sees are settled at once. Bounded by the messages between the floor and the
/// last one received, which the agent's queue bounds.
#[derive(Debug, Clone, Default)]
pub struct AckFloor {
    acked: u64,
    received: u64,
    /// Settled messages above the first unsettled one.
    settled: BTreeSet<u64>,
}

impl AckFloor {
    /// Creates a floor that continues after `acked`, the cursor that the engine confirmed; 0 if there is none.
    pub fn new(acked: u64) -> Self {
        Self { acked, received: acked, settled: BTreeSet::new() }
    }

    /// Returns the `seq` to acknowledge up to.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Returns the highest `seq` received in order.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Takes the next message in order. `false` and no effect for any other `seq`.
    #[must_use]
    pub fn receive(&mut self, seq: u64) -> bool {
        let is_next = self.received.checked_add(1) == Some(seq);
        if is_next {
            self.received = seq;
        }
        is_next
    }

    /// Settles a message and returns the new floor if it rises. A `seq` that is not outstanding has no effect: it was
    /// not received, is settled already, or is 0 and outside the sequence.
    pub fn settle(&mut self, seq: u64) -> Option<u64> {
        if seq <= self.acked || seq > self.received {
            return None;
        }
        self.settled.insert(seq);
        let before = self.acked;
        while self.settled.first() == Some(&(self.acked + 1)) {
            self.settled.pop_first();
            self.acked += 1;
        }
        (self.acked > before).then_some(self.acked)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_floor_waits_for_the_lowest_unsettled_message() {
        let mut floor = AckFloor::new(4);
        assert!(floor.receive(5) && floor.receive(6) && floor.receive(7));
        assert!(!floor.receive(7) && !floor.receive(9));
        assert_eq!(floor.settle(6), None);
        assert_eq!(floor.settle(8), None);
        assert_eq!(floor.settle(5), Some(6));
        assert_eq!(floor.settle(5), None);
        assert_eq!(floor.settle(7), Some(7));
    }

    proptest! {
        #[test]
        fn acks_never_pass_an_unsettled_message(start in 0u64..3, steps in proptest::collection::vec((any::<bool>(), 0u64..20), 0..80)) {
            let mut floor = AckFloor::new(start);
            let mut settled = HashSet::new();
            let mut last = start;
            for (receives, seq) in steps {
                if receives {
                    let next = floor.received() + 1;
                    prop_assert!(floor.receive(next));
                } else {
                    if seq <= floor.received() {
                        settled.insert(seq);
                    }
                    if let Some(acked) = floor.settle(seq) {
                        prop_assert!(acked > last);
                        last = acked;
                    }
                }
                prop_assert!((start + 1..=floor.acked()).all(|seq| settled.contains(&seq)));
                prop_assert!(floor.acked() == floor.received() || !settled.contains(&(floor.acked() + 1)));
            }
        }
    }
}
