//! Expiry of deliveries: dead letters, with hints for tombstones and notices for senders.

use std::{collections::HashMap, time::Duration};

use relay_domain::{AgentId, WorkspaceScope, events::kind, mailboxes::dead_letter::DeadLetterReason, metric_names};
use relay_store::{
    events::RecordedEvents,
    mailboxes::expiry::{DeadLetteredDelivery, ExpiryPass},
};

use super::Mailboxes;
use crate::{Engine, EngineResult, hints::AgentNotices, tick::TickOutcome};

const DELETED_AGENTS_BATCH_SIZE: i64 = 100;

/// Runs one step of each pass, then dead-letters the deliveries of deleted agents.
pub async fn expire_due_deliveries(engine: &Engine) -> EngineResult<TickOutcome> {
    if !engine.store().has_expired_deliveries(engine.now()).await? {
        // An idle tick ends here, without the transactions of both passes.
        return Ok(TickOutcome { lag: Some(Duration::ZERO), ..TickOutcome::default() });
    }
    let mut ticked = TickOutcome::default();
    for pass in [ExpiryPass::First, ExpiryPass::Second] {
        let expired = engine.store().expire_step(pass, engine.now()).await?;
        engine.mailboxes().announce_dead_letters(&expired.dead_lettered, expired.recorded);
        ticked.worked += expired.dead_lettered.len() as u64;
        ticked.more |= expired.more;
    }
    let deleted = engine.store().mailboxes_of_deleted_agents(DELETED_AGENTS_BATCH_SIZE).await?;
    if !deleted.is_empty() {
        ticked.worked += engine.mailboxes().dead_letter_mailboxes(&deleted, DeadLetterReason::AgentDeleted).await?;
        ticked.more = true;
    }
    ticked.lag = Some(engine.store().expiry_lag(engine.now()).await?);
    Ok(ticked)
}

impl Mailboxes {
    /// Dead-letters expired deliveries of these mailboxes, as the expiry loop would, for a reader that finds an expired
    /// row first. Returns them by mailbox and seq.
    pub async fn dead_letter_expired(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
    ) -> EngineResult<Vec<DeadLetteredDelivery>> {
        let (dead_lettered, recorded) = self.core.store.dead_letter_expired(mailboxes, self.core.now()).await?;
        self.announce_dead_letters(&dead_lettered, recorded);
        Ok(dead_lettered)
    }

    /// Dead-letters all unsettled deliveries of these mailboxes. Returns their number; the expiry loop finds those that
    /// a race leaves.
    pub(crate) async fn dead_letter_mailboxes(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        reason: DeadLetterReason,
    ) -> EngineResult<u64> {
        let mut done = 0;
        loop {
            let (dead_lettered, recorded) =
                self.core.store.dead_letter_mailboxes(mailboxes, reason, self.core.now()).await?;
            if dead_lettered.is_empty() {
                return Ok(done);
            }
            done += dead_lettered.len() as u64;
            self.announce_dead_letters(&dead_lettered, recorded);
        }
    }

    /// Announces dead letters to the mailboxes' gateways, the senders and observers. These are hints: the dead letters
    /// are committed.
    pub(crate) fn announce_dead_letters(&self, dead_lettered: &[DeadLetteredDelivery], recorded: Vec<RecordedEvents>) {
        if dead_lettered.is_empty() {
            return;
        }
        for letters in dead_lettered.chunk_by(|a, b| a.reason == b.reason) {
            let reason = letters[0].reason.as_str();
            metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason)
                .increment(letters.len() as u64);
        }
        let mailboxes = dead_lettered.chunk_by(|a, b| (a.scope, a.delivery_id.agent) == (b.scope, b.delivery_id.agent));
        self.core.mailboxes_settled(mailboxes.map(|rows| (rows[0].scope, rows[0].delivery_id.agent)).collect());
        let mut by_sender: HashMap<_, Vec<_>> = HashMap::new();
        for letter in dead_lettered {
            if let Some(sender) = letter.sender {
                by_sender.entry((letter.scope, sender)).or_default().push(letter.notice());
            }
        }
        let notices = by_sender.into_iter().map(|((scope, agent), each)| AgentNotices {
            scope,
            agent,
            event: kind::DELIVERY_FAILED,
            each,
        });
        self.core.notify_senders(notices.collect());
        recorded.into_iter().for_each(|recorded| self.core.announce(recorded));
    }
}
