//! [`ClaimWaits`]: claims that wait for a delivery. One listener per process wakes them, and their statements leave
//! connections to others.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use relay_domain::{AgentId, WorkspaceId};
use relay_stream::Hint;
use tokio::sync::{Notify, broadcast};

use crate::fair_permits::FairPermits;

/// Claims of one agent that may wait at the same time. A consumer needs one; another one may start before it ends.
const MAX_PER_AGENT: usize = 4;
/// Claims whose statements run at the same time: half of a gateway's connections, an eighth for one family.
const CONCURRENT_CLAIMS: usize = 8;
const CONCURRENT_CLAIMS_OF_FAMILY: usize = 2;

type Mailbox = (WorkspaceId, AgentId);

/// Waiting claims of this process by mailbox, the oldest first.
pub(crate) struct ClaimWaits {
    waiting: Mutex<HashMap<Mailbox, Vec<Arc<Waiter>>>>,
    /// Permits for the statements of claims.
    pub(super) permits: FairPermits,
}

#[derive(Debug, Default)]
struct Waiter {
    woken: Notify,
    /// Newer claims of the agent wait.
    is_superseded: AtomicBool,
}

/// Claim that may wait. It is forgotten when this is dropped.
pub(super) struct WaitingClaim {
    waits: Arc<ClaimWaits>,
    mailbox: Mailbox,
    waiter: Arc<Waiter>,
}

impl Default for ClaimWaits {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            permits: FairPermits::with_share(CONCURRENT_CLAIMS, CONCURRENT_CLAIMS_OF_FAMILY),
        }
    }
}

impl ClaimWaits {
    /// Adds a claim, which ends the wait of the oldest one if the agent has too many.
    pub(super) fn add(self: &Arc<Self>, mailbox: Mailbox) -> WaitingClaim {
        let waiter = Arc::<Waiter>::default();
        let mut waiting = self.lock();
        let own = waiting.entry(mailbox).or_default();
        own.push(Arc::clone(&waiter));
        if own.len() > MAX_PER_AGENT {
            let oldest = own.remove(0);
            // Before the wake-up, so that the claim sees it when it wakes.
            oldest.is_superseded.store(true, Ordering::Relaxed);
            oldest.woken.notify_one();
        }
        WaitingClaim { waits: Arc::clone(self), mailbox, waiter }
    }

    fn wake(&self, mailboxes: &[Mailbox]) {
        let waiting = self.lock();
        let waiters = mailboxes.iter().filter_map(|mailbox| waiting.get(mailbox)).flatten();
        // A claim whose statement runs right now finds the wake-up when it begins to wait.
        waiters.for_each(|waiter| waiter.woken.notify_one());
    }

    fn wake_all(&self) {
        self.lock().values().flatten().for_each(|waiter| waiter.woken.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Mailbox, Vec<Arc<Waiter>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitingClaim {
    /// Returns when a delivery may have arrived since the last call, or newer claims have taken the place of this one.
    pub(super) async fn woken(&self) {
        self.waiter.woken.notified().await;
    }

    pub(super) fn is_superseded(&self) -> bool {
        self.waiter.is_superseded.load(Ordering::Relaxed)
    }
}

impl Drop for WaitingClaim {
    fn drop(&mut self) {
        let mut waiting = self.waits.lock();
        let Some(own) = waiting.get_mut(&self.mailbox) else { return };
        own.retain(|waiter| !Arc::ptr_eq(waiter, &self.waiter));
        if own.is_empty() {
            waiting.remove(&self.mailbox);
        }
    }
}

/// Wakes waiting claims at hints about their mailboxes, until the engine is dropped.
pub(crate) async fn wake_claims(waits: Weak<ClaimWaits>, mut hints: broadcast::Receiver<Arc<Hint>>) {
    loop {
        let hint = hints.recv().await;
        let Some(waits) = waits.upgrade() else { return };
        match hint.as_deref() {
            Ok(Hint::DeliveriesDue { agents } | Hint::MailboxesChanged { agents }) => waits.wake(agents),
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => waits.wake_all(),
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const MAILBOX: Mailbox = (WorkspaceId::new(1), AgentId::new(2));

    #[tokio::test]
    async fn a_hint_wakes_the_claims_of_its_mailbox() {
        let waits = Arc::<ClaimWaits>::default();
        let other = waits.add((WorkspaceId::new(1), AgentId::new(3)));
        let claims = [waits.add(MAILBOX), waits.add(MAILBOX)];
        waits.wake(&[MAILBOX]);
        for claim in &claims {
            assert!(claim.woken().now_or_never().is_some() && !claim.is_superseded());
            assert!(claim.woken().now_or_never().is_none(), "once");
        }
        assert!(other.woken().now_or_never().is_none());
        drop((claims, other));
        assert!(waits.lock().is_empty());
    }

    #[tokio::test]
    async fn a_claim_too_many_ends_the_oldest() {
        let waits = Arc::<ClaimWaits>::default();
        let claims: Vec<_> = (0..=MAX_PER_AGENT).map(|_| waits.add(MAILBOX)).collect();
        assert!(claims[0].woken().now_or_never().is_some());
        let superseded: Vec<bool> = claims.iter().map(WaitingClaim::is_superseded).collect();
        assert!(superseded[0] && !superseded[1..].contains(&true));
        drop(claims);
        assert!(waits.lock().is_empty());
    }
}
