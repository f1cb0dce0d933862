//! Periodic work of a connection: late probes, proofs of liveness, silence.

use std::time::Duration;

use relay_domain::nodes::takeover::ProbeOutcome;
use tokio::time::Instant;

use super::{
    connection::{Connection, MAX_FRAMES_PER_WINDOW},
    pacing::Pacing,
};

/// A socket without inbound frames is pinged, and later closed. The slowest clients send heartbeats every 30 s.
const PING_AFTER: Duration = Duration::from_secs(25);
const PING_EVERY: Duration = Duration::from_secs(5);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(75);
/// Time that a peer has to answer a ping that proves it alive.
const PROOF_TIMEOUT: Duration = Duration::from_secs(1);

impl Connection {
    /// Time of the next tick or due ack.
    pub(super) fn next_wake(&self) -> Instant {
        let tick = self.ticked + self.tick_interval();
        self.next_due_ack().map_or(tick, |due| due.min(tick))
    }

    /// Runs the tick if it is due. Called after every event, so that a busy connection does not postpone it.
    pub(super) fn tick_if_due(&mut self) {
        if self.closing.is_none() && self.ticked.elapsed() >= self.tick_interval() {
            self.ticked = Instant::now();
            self.on_tick();
        }
    }

    /// Interval until the next tick; shorter while something waits for it.
    fn tick_interval(&self) -> Duration {
        let retry = !self.queued.is_empty() && !self.outbound.is_full();
        if retry && !self.state.registry.is_trusted() {
            return Duration::from_millis(200);
        }
        if retry || self.rate.1 >= MAX_FRAMES_PER_WINDOW {
            Duration::from_millis(10)
        } else if !self.pending_proofs.is_empty() || self.probing > 0 {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    fn on_tick(&mut self) {
        if self.probing > 0 {
            self.expire_late_probes();
        }
        let (waiting, silent): (Vec<_>, Vec<_>) =
            self.pending_proofs.drain(..).partition(|(since, _)| since.elapsed() < PROOF_TIMEOUT);
        self.pending_proofs = waiting;
        for (_, proof) in silent {
            let _ = proof.send(ProbeOutcome::Silent);
        }
        if !self.accepts_input() {
            // The socket is not being read, so the peer's silence proves nothing.
            self.last_inbound = Instant::now();
            if let Some(pacing) = &mut self.pacing {
                pacing.restart_silence_timer();
            }
        }
        let quiet = self.last_inbound.elapsed();
        if quiet > SILENCE_TIMEOUT || self.pacing.as_ref().is_some_and(Pacing::is_silent) {
            self.closing = Some((1011, "no sign of life"));
        } else if quiet > PING_AFTER && self.pinged.elapsed() >= PING_EVERY {
            self.pinged = Instant::now();
            self.outbound.send_ping();
        }
    }
}
