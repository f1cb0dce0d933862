//! Signs of life of a peer: when its silence is questioned by a ping, when it ends the connection, and the proofs that
//! other gateways ask for.

use std::time::Duration;

use relay_domain::nodes::takeover::ProbeOutcome;
use tokio::{sync::oneshot, time::Instant};

/// A socket without inbound frames is pinged, and later closed. The slowest clients send heartbeats every 30 s.
const PING_AFTER: Duration = Duration::from_secs(25);
const PING_EVERY: Duration = Duration::from_secs(5);
// One heartbeat of the slowest clients may be lost, and the next may be 15 s late.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(75);
/// Time that a peer has to answer a ping that proves it alive.
const PROOF_TIMEOUT: Duration = Duration::from_secs(1);

/// Liveness of one connection's peer.
#[derive(Debug)]
pub(super) struct PeerLiveness {
    last_inbound: Instant,
    /// Time of the last ping to a silent peer.
    pinged: Instant,
    proofs: Vec<(Instant, oneshot::Sender<ProbeOutcome>)>,
}

/// Due reaction to a silent peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Silence {
    Ping,
    /// The peer is taken to be dead.
    Close,
}

impl PeerLiveness {
    pub(super) const fn new(now: Instant) -> Self {
        Self { last_inbound: now, pinged: now, proofs: Vec::new() }
    }

    /// Handles a message of the peer. Returns the proofs that it answers.
    pub(super) fn on_inbound(&mut self, now: Instant) -> impl Iterator<Item = oneshot::Sender<ProbeOutcome>> {
        self.last_inbound = now;
        self.proofs.drain(..).map(|(_, proof)| proof)
    }

    /// Adds a proof, answered by the next message of the peer.
    pub(super) fn add_proof(&mut self, now: Instant, proof: oneshot::Sender<ProbeOutcome>) {
        self.proofs.push((now, proof));
    }

    pub(super) const fn awaits_proof(&self) -> bool {
        !self.proofs.is_empty()
    }

    /// Returns the proofs whose time is over.
    pub(super) fn take_late_proofs(&mut self, now: Instant) -> Vec<oneshot::Sender<ProbeOutcome>> {
        let is_late = |(since, _): &mut (Instant, _)| now.duration_since(*since) >= PROOF_TIMEOUT;
        self.proofs.extract_if(.., is_late).map(|(_, proof)| proof).collect()
    }

    /// Restarts the timeout. Called while the socket is not read, when the peer's silence proves nothing.
    pub(super) const fn restart(&mut self, now: Instant) {
        self.last_inbound = now;
    }

    /// Returns the reaction that is due now, if any.
    pub(super) fn check(&mut self, now: Instant) -> Option<Silence> {
        let quiet = now.duration_since(self.last_inbound);
        if quiet > SILENCE_TIMEOUT {
            return Some(Silence::Close);
        }
        if quiet <= PING_AFTER || now.duration_since(self.pinged) < PING_EVERY {
            return None;
        }
        self.pinged = now;
        Some(Silence::Ping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_is_pinged_and_then_given_up() {
        let start = Instant::now();
        let mut liveness = PeerLiveness::new(start);
        let mut reactions = Vec::new();
        for second in 0..=76 {
            reactions.extend(liveness.check(start + Duration::from_secs(second)).map(|reaction| (second, reaction)));
        }
        let pings = (26..=75).step_by(5).map(|second| (second, Silence::Ping));
        assert_eq!(reactions, pings.chain([(76, Silence::Close)]).collect::<Vec<_>>());
        assert!(liveness.on_inbound(start + Duration::from_secs(76)).next().is_none());
        assert_eq!(liveness.check(start + Duration::from_secs(77)), None);
    }

    #[test]
    fn a_proof_is_answered_by_the_next_message_or_late() {
        let start = Instant::now();
        let mut liveness = PeerLiveness::new(start);
        liveness.add_proof(start, oneshot::channel().0);
        liveness.add_proof(start + PROOF_TIMEOUT, oneshot::channel().0);
        assert_eq!(liveness.take_late_proofs(start + PROOF_TIMEOUT).len(), 1);
        assert!(liveness.awaits_proof());
        assert_eq!(liveness.on_inbound(start + PROOF_TIMEOUT).count(), 1);
        assert!(!liveness.awaits_proof());
    }
}
