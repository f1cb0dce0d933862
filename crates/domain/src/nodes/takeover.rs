//! Takeover of a provider by a second connection.

/// Connection that holds the provider now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incumbent {
    /// No connection, or the lease of the holder's gateway has expired.
    None,
    /// The same instance registers again.
    SameInstance,
    /// Another instance, on a gateway with a valid lease. Only that gateway can check the connection.
    Other,
}

/// Result of probing the holder's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// A frame came back from the incumbent's socket within one second.
    Alive,
    /// The socket stayed silent or was closed, or the gateway did not respond.
    Silent,
}

/// Decision on a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeoverDecision {
    /// Register with epoch + 1; the incumbent is superseded.
    TakeOver,
    /// Probe the incumbent through its gateway first.
    Probe,
    /// Refuse with `provider_instance_conflict`. Some clients stop permanently on this error, so it requires an
    /// incumbent that has just responded.
    Refuse,
}

/// Decides on a registration of a broker's provider. The newest connection of a direct node always wins.
#[must_use]
pub const fn decide_takeover(incumbent: Incumbent, proof: Option<ProbeOutcome>) -> TakeoverDecision {
    match (incumbent, proof) {
        (Incumbent::None | Incumbent::SameInstance, _) | (_, Some(ProbeOutcome::Silent)) => TakeoverDecision::TakeOver,
        (Incumbent::Other, Some(ProbeOutcome::Alive)) => TakeoverDecision::Refuse,
        (Incumbent::Other, None) => TakeoverDecision::Probe,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_live_incumbent_refuses_a_registration() {
        for incumbent in [Incumbent::None, Incumbent::SameInstance, Incumbent::Other] {
            for proof in [None, Some(ProbeOutcome::Silent), Some(ProbeOutcome::Alive)] {
                let refused = decide_takeover(incumbent, proof) == TakeoverDecision::Refuse;
                let proved = proof == Some(ProbeOutcome::Alive);
                assert_eq!(refused, incumbent == Incumbent::Other && proved);
            }
        }
    }
}
