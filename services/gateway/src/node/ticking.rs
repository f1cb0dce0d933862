//! What a connection does as time passes, however busy it is: late probes, proofs of life, silence.

use std::time::{Duration, Instant};

use relay_domain::takeover::Proof;

use super::{
    connection::{Connection, RATE},
    pacing::Pacing,
};

/// A socket without any inbound frame is pinged, and later given up. The slowest clients heartbeat each
/// 30 s.
const PING_AFTER: Duration = Duration::from_secs(25);
const PING_EVERY: Duration = Duration::from_secs(5);
const DEAD_AFTER: Duration = Duration::from_secs(75);
/// How long a peer has to answer the ping that proves it alive.
const PROOF_WAIT: Duration = Duration::from_secs(1);

impl Connection {
    /// When the task goes round again if nothing happens.
    pub(super) fn wakes_at(&self) -> Instant {
        let tick = self.ticked + self.idle();
        self.next_due_ack().map_or(tick, |due| due.min(tick))
    }

    /// Looks at the clock if it is time. What happens in between does not put it off.
    pub(super) fn tick_if_due(&mut self) {
        if self.closing.is_none() && self.ticked.elapsed() >= self.idle() {
            self.ticked = Instant::now();
            self.on_tick();
        }
    }

    /// How long the clock need not be looked at.
    fn idle(&self) -> Duration {
        let retry = !self.queued.is_empty() && !self.outbound.is_full();
        if retry && !self.state.registry.is_trusted() {
            return Duration::from_millis(200);
        }
        if retry || self.rate.1 >= RATE {
            Duration::from_millis(10)
        } else if !self.provers.is_empty() || self.probing > 0 {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    fn on_tick(&mut self) {
        if self.probing > 0 {
            self.give_up_late_probes();
        }
        let (waiting, silent): (Vec<_>, Vec<_>) =
            self.provers.drain(..).partition(|(since, _)| since.elapsed() < PROOF_WAIT);
        self.provers = waiting;
        for (_, proof) in silent {
            let _ = proof.send(Proof::Silent);
        }
        if !self.takes_input() {
            // Its silence is ours.
            self.last_inbound = Instant::now();
            if let Some(pacing) = &mut self.pacing {
                pacing.excuse();
            }
        }
        let quiet = self.last_inbound.elapsed();
        if quiet > DEAD_AFTER || self.pacing.as_ref().is_some_and(Pacing::is_silent) {
            self.closing = Some((1011, "no sign of life"));
        } else if quiet > PING_AFTER && self.pinged.elapsed() >= PING_EVERY {
            self.pinged = Instant::now();
            self.outbound.ping();
        }
    }
}
