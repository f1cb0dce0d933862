//! Claims of deliveries for consumers without a socket.

use std::time::Duration;

use relay_domain::{
    ClaimId,
    mailboxes::{Delivery, stream::Seq},
    metric_names,
};
use relay_store::mailboxes::claims::{ClaimLease, ClaimOutcome, NewClaim};
use tokio::time::Instant;

use super::{Mailboxes, claim_waits::WaitingClaim, deliveries::text_slot};
use crate::{EngineError, EngineResult, access::callers::AgentCaller, error::Conflict, parts::Parts};

/// Default and maximum number of deliveries per claim.
pub const CLAIM_LIMIT: (i64, i64) = (10, 200);
/// Longest wait of a claim. Gateways allow its request more time than others.
pub const MAX_WAIT: Duration = Duration::from_secs(30);
/// Default lease of claimed deliveries.
pub const LEASE: Duration = Duration::from_secs(60);
pub const LEASE_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(12 * 3600);
/// Poll interval of a waiting claim when no hint arrives.
const POLL_EVERY: Duration = Duration::from_secs(2);

/// Longest wait for a permit among the claims of a workspace.
const PERMIT_WAIT: Duration = Duration::from_secs(5);

/// Delivery leased to the caller.
#[derive(Debug)]
pub struct ClaimedDelivery {
    pub delivery: Delivery,
    /// Lease and claim count.
    pub claim: ClaimLease,
}

impl Mailboxes {
    /// Leases up to `limit` of the caller's deliveries, lowest seq first; waits up to `wait` for the first one, unless
    /// the agent has newer claims that wait.
    ///
    /// # Errors
    /// When the caller is not on a node of kind poll, or the lease is out of bounds.
    pub async fn claim(
        &self,
        caller: &AgentCaller,
        limit: i64,
        lease: Duration,
        wait: Duration,
    ) -> EngineResult<Parts<ClaimedDelivery>> {
        if !LEASE_RANGE.contains(&lease) {
            return Err(EngineError::invalid_request("lease_ms must be 1000 to 43200000"));
        }
        let until = Instant::now() + wait.min(MAX_WAIT);
        // Added before the first read, so that no later hint is missed.
        let waiting = (!wait.is_zero()).then(|| self.claim_waits.add((caller.scope.workspace_id(), caller.agent_id)));
        loop {
            let next = match self.claim_now(caller, limit, lease).await? {
                ClaimOutcome::NotPolled => return Err(EngineError::Conflict(Conflict::NotPolled)),
                ClaimOutcome::Claimed(claimed) => return self.load_claimed(caller, &claimed).await,
                // The next claim is authenticated again.
                ClaimOutcome::TokenRotated => return self.load_claimed(caller, &[]).await,
                ClaimOutcome::Empty { next_at } => next_at,
            };
            let may_wait = |waiting: &&WaitingClaim| Instant::now() < until && !waiting.is_superseded();
            let Some(waiting) = waiting.as_ref().filter(may_wait) else {
                return self.load_claimed(caller, &[]).await;
            };
            // A lease that has ended is waited for no longer.
            // 5 ms later, because clocks differ: a claim before the end by the clock of Postgres finds nothing.
            let back = next.map(|at| (at - self.core.now()).to_std().unwrap_or_default() + Duration::from_millis(5));
            let pause = back.unwrap_or(POLL_EVERY).min(POLL_EVERY);
            let look_at = until.min(Instant::now() + pause);
            // Woken or not, storage decides whether there is a delivery.
            let _ = tokio::time::timeout_at(look_at, waiting.woken()).await;
        }
    }

    async fn claim_now(&self, caller: &AgentCaller, limit: i64, lease: Duration) -> EngineResult<ClaimOutcome> {
        let permit = self.claim_waits.permits.acquire(self.core.family(caller.scope).await, PERMIT_WAIT).await;
        // Held for the statement only: claims that wait leave the permits to others.
        let _permit = permit.ok_or(EngineError::Overloaded)?;
        let claim = NewClaim {
            agent: caller.agent_id,
            token_generation: caller.token_generation,
            claim_id: ClaimId::new(self.core.next_id()),
            limit,
            lease,
        };
        Ok(self.core.store.claim_deliveries(caller.scope, claim).await?)
    }

    async fn load_claimed(&self, caller: &AgentCaller, claimed: &[ClaimLease]) -> EngineResult<Parts<ClaimedDelivery>> {
        let seqs: Vec<Seq> = claimed.iter().map(|one| one.seq).collect();
        let deliveries = self.core.store.deliveries_at(caller.scope, caller.agent_id, &seqs).await?;
        let own = |seq| claimed.iter().find(|one| one.seq == seq).copied();
        let claimed: Vec<_> = deliveries
            .into_iter()
            .filter_map(|(delivery, bytes)| Some((ClaimedDelivery { claim: own(delivery.seq)?, delivery }, bytes)))
            .collect();
        metrics::counter!(metric_names::DELIVERIES_CLAIMED).increment(claimed.len() as u64);
        self.core.read_texts(caller.scope, claimed, |claimed| text_slot(&mut claimed.delivery)).await
    }
}
