//! Deliveries whose time is up: dead-lettered, the gateway told to send a tombstone, the sender told why.

use relay_domain::{AgentId, WorkspaceScope, dead_letter::DeadReason, event, metric_names};
use relay_store::{
    events::Recorded,
    expiry::{DeadLettered, ExpiryPass},
};

use super::Ticked;
use crate::{Engine, EngineResult};

/// Mailboxes of deleted agents that one tick empties.
const DELETED_AT_ONCE: i64 = 100;

/// One step of each pass, then what deleted agents have left.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let mut ticked = Ticked::default();
    for pass in [ExpiryPass::First, ExpiryPass::Second] {
        let expired = engine.store().expire_step(pass, engine.now()).await?;
        engine.announce_dead_letters(&expired.dead, expired.recorded);
        ticked.worked += expired.dead.len() as u64;
        ticked.more |= expired.more;
    }
    let deleted = engine.store().mailboxes_of_deleted(DELETED_AT_ONCE).await?;
    if !deleted.is_empty() {
        ticked.worked += engine.dead_letter_mailboxes(&deleted, DeadReason::AgentDeleted).await?;
        ticked.more = true;
    }
    ticked.lag = Some(engine.store().expiry_lag(engine.now()).await?);
    Ok(ticked)
}

impl Engine {
    /// Dead-letters what has expired in these mailboxes, as the expiry loop would, for whoever meets an
    /// expired row first. Returns what this call dead-lettered, by mailbox and seq.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a race; nothing has changed then.
    pub async fn dead_letter_expired(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
    ) -> EngineResult<Vec<DeadLettered>> {
        let (dead, recorded) = self.store().dead_letter_expired(mailboxes, self.now()).await?;
        self.announce_dead_letters(&dead, recorded);
        Ok(dead)
    }

    /// Dead-letters whatever is not settled in these mailboxes. Returns how much that was; what a race leaves is
    /// found by the expiry loop.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a race.
    pub(crate) async fn dead_letter_mailboxes(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        reason: DeadReason,
    ) -> EngineResult<u64> {
        let mut done = 0;
        loop {
            let (dead, recorded) = self.store().dead_letter_mailboxes(mailboxes, reason, self.now()).await?;
            if dead.is_empty() {
                return Ok(done);
            }
            done += dead.len() as u64;
            self.announce_dead_letters(&dead, recorded);
        }
    }

    /// Tells the mailboxes' gateways to look, and the senders and observers that a message was not delivered.
    /// These are hints: the dead letters themselves are committed.
    pub(crate) fn announce_dead_letters(&self, dead: &[DeadLettered], recorded: Vec<Recorded>) {
        if dead.is_empty() {
            return;
        }
        for letters in dead.chunk_by(|a, b| a.reason == b.reason) {
            let reason = letters[0].reason.as_str();
            metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason)
                .increment(letters.len() as u64);
        }
        let mailboxes = dead.chunk_by(|a, b| (a.scope, a.delivery_id.agent) == (b.scope, b.delivery_id.agent));
        self.hints().mailboxes_changed(mailboxes.map(|rows| (rows[0].scope, rows[0].delivery_id.agent)));
        for letter in dead {
            let Some(sender) = letter.sender else {
                continue;
            };
            self.hints().notify(letter.scope, vec![sender], "agent", event::DELIVERY_FAILED, letter.notice());
        }
        recorded.into_iter().for_each(|recorded| self.announce(recorded));
    }
}
