//! Who serves a node's provider when a second connection asks for it.

/// What is known of the connection that holds the provider now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incumbent {
    /// Nobody is connected, or the holder's gateway lease has run out.
    None,
    /// The same instance registers again.
    SameInstance,
    /// Another instance, on a gateway whose lease runs. Only that gateway can tell whether it lives.
    Other,
}

/// What the holder's gateway answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// A frame came back from the incumbent's socket within the probe's second.
    Alive,
    /// The socket stayed silent, is gone, or the gateway did not answer.
    Silent,
}

/// What to do with a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Register with epoch + 1; whoever was there is superseded.
    TakeOver,
    /// Ask the holder's gateway first.
    Probe,
    /// Refuse with `provider_instance_conflict`. Providers of some clients stop for good on it, so it
    /// needs an incumbent that has just proved itself alive.
    Refuse,
}

/// Decides on a registration. A direct node is one agent's own connection: the newest wins always.
#[must_use]
pub const fn decide(direct: bool, incumbent: Incumbent, proof: Option<Proof>) -> Decision {
    match (direct, incumbent, proof) {
        (true, _, _) | (_, Incumbent::None | Incumbent::SameInstance, _) | (_, _, Some(Proof::Silent)) => {
            Decision::TakeOver
        }
        (_, _, Some(Proof::Alive)) => Decision::Refuse,
        (_, Incumbent::Other, None) => Decision::Probe,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_proof_of_life_refuses() {
        for direct in [true, false] {
            for incumbent in [Incumbent::None, Incumbent::SameInstance, Incumbent::Other] {
                for proof in [None, Some(Proof::Silent), Some(Proof::Alive)] {
                    let refused = decide(direct, incumbent, proof) == Decision::Refuse;
                    let proved = proof == Some(Proof::Alive);
                    assert_eq!(refused, !direct && incumbent == Incumbent::Other && proved);
                }
            }
        }
    }
}
