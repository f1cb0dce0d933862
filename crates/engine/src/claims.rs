//! Claiming deliveries: work for a consumer without a socket, promptly.

use std::time::Duration;

use relay_domain::{AgentId, WorkspaceScope, metric_names};
use relay_store::claims::{ClaimOutcome, Claimed};
use relay_stream::Hint;
use tokio::{sync::broadcast, time::Instant};

use crate::{Engine, EngineError, EngineResult, auth::AgentCaller, deliveries::Delivery};

/// Deliveries of one claim, unless a limit is given, and at most.
pub const CLAIMED: (i64, i64) = (10, 200);
/// How long a claim may wait for something to come. Gateways give its request longer than others.
pub const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How long claimed deliveries are the consumer's own, unless it says.
pub const LEASE: Duration = Duration::from_secs(60);
/// The bounds of what it may say.
pub const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(12 * 3600);
/// A waiting claim looks this often if no hint comes.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A delivery that is the caller's own for a while.
#[derive(Debug)]
pub struct ClaimedDelivery {
    /// The delivery.
    pub delivery: Delivery,
    /// How long, and how often it was claimed.
    pub claim: Claimed,
}

impl Engine {
    /// Leases up to `limit` of the caller's deliveries, lowest seq first; waits up to `wait` for the first one.
    ///
    /// # Errors
    /// When the caller is not on a node of kind poll, or the lease is out of bounds.
    pub async fn claim(
        &self,
        caller: &AgentCaller,
        limit: i64,
        lease: Duration,
        wait: Duration,
    ) -> EngineResult<Vec<ClaimedDelivery>> {
        if !LEASES.contains(&lease) {
            return Err(EngineError::InvalidRequest("lease_ms must be 1000 to 43200000".into()));
        }
        let until = Instant::now() + wait.min(LONGEST_WAIT);
        // Before the first look: what comes after it is heard of.
        let mut hints = self.hints().listen();
        loop {
            let outcome =
                self.store().claim_deliveries(caller.scope, caller.agent_id, self.next_id(), limit, lease).await?;
            let next = match outcome {
                ClaimOutcome::NotPolled => return Err(EngineError::NotPolled),
                ClaimOutcome::Claimed(claimed) => return self.claimed(caller, &claimed).await,
                ClaimOutcome::Nothing(next) => next,
            };
            if Instant::now() >= until {
                return Ok(Vec::new());
            }
            let back = next.map(|at| (at - self.now()).to_std().unwrap_or_default() + Duration::from_millis(5));
            let pause = back.unwrap_or(LOOK_EVERY).min(LOOK_EVERY);
            let look_at = until.min(Instant::now() + pause);
            let _ = tokio::time::timeout_at(look_at, heard_of(&mut hints, caller.scope, caller.agent_id)).await;
        }
    }

    async fn claimed(&self, caller: &AgentCaller, claimed: &[Claimed]) -> EngineResult<Vec<ClaimedDelivery>> {
        let seqs: Vec<i64> = claimed.iter().map(|one| one.seq).collect();
        let rows = self.store().deliveries_at(caller.scope, caller.agent_id, &seqs).await?;
        let own = |seq| claimed.iter().find(|one| one.seq == seq).copied();
        let rows = rows.into_iter().filter_map(|row| {
            let claim = own(row.seq)?;
            Some(ClaimedDelivery { delivery: Delivery::from(row), claim })
        });
        let claimed: Vec<_> = rows.collect();
        metrics::counter!(metric_names::DELIVERIES_CLAIMED).increment(claimed.len() as u64);
        Ok(claimed)
    }
}

/// Ends when something may have come for the agent.
async fn heard_of(hints: &mut broadcast::Receiver<std::sync::Arc<Hint>>, scope: WorkspaceScope, agent: AgentId) {
    let key = (scope.workspace_id(), agent);
    loop {
        match hints.recv().await.as_deref() {
            Ok(Hint::DeliveriesDue { agents } | Hint::MailboxesChanged { agents }) if agents.contains(&key) => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            // With the engine gone there is nothing to hear.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}
