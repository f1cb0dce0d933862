//! Deliveries whose time is up: dead-lettered, the gateway told to send a tombstone, the sender told why.

use relay_domain::{AgentId, WorkspaceScope, metric_names};
use relay_store::expiry::{DeadLettered, ExpiryPass, TTL_ERROR};

use super::Ticked;
use crate::{Engine, EngineResult};

/// One step of each pass.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let mut ticked = Ticked::default();
    for pass in [ExpiryPass::First, ExpiryPass::Second] {
        let expired = engine.store().expire_step(pass, engine.now()).await?;
        engine.announce_dead_letters(&expired.dead);
        ticked.worked += expired.dead.len() as u64;
        ticked.more |= expired.more;
    }
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
        let dead = self.store().dead_letter_expired(mailboxes, self.now()).await?;
        self.announce_dead_letters(&dead);
        Ok(dead)
    }

    /// Tells the mailboxes' gateways to look, and the senders that their message was not delivered. Both
    /// are hints: the dead letters themselves are committed.
    fn announce_dead_letters(&self, dead: &[DeadLettered]) {
        if dead.is_empty() {
            return;
        }
        metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => "ttl_expired")
            .increment(dead.len() as u64);
        let mailboxes = dead.chunk_by(|a, b| (a.scope, a.delivery_id.agent) == (b.scope, b.delivery_id.agent));
        self.hints().mailboxes_changed(mailboxes.map(|rows| (rows[0].scope, rows[0].delivery_id.agent)));
        for letter in dead {
            let Some(sender) = letter.sender else {
                continue;
            };
            let data = serde_json::json!({
                "delivery_id": letter.delivery_id.to_string(),
                "message_id": letter.delivery_id.source.to_string(),
                "target_agent_id": letter.delivery_id.agent,
                "target_agent_name": letter.agent_name,
                "seq": letter.seq,
                "reason": "ttl_expired",
                "error": TTL_ERROR,
                "retryable": false,
            });
            self.hints().notify(letter.scope, vec![sender], "agent", "delivery.failed", data);
        }
    }
}
