//! End of agents' sessions: their deliveries become dead letters, and agents released with deletion are deleted.

use relay_domain::{AgentId, WorkspaceScope, mailboxes::dead_letter::DeadLetterReason};
use relay_store::{DeleteCondition, mailboxes::expiry::MAX_DEAD_LETTERED};

use crate::{Engine, EngineError, EngineResult, error::Missing, tick::TickOutcome};

const BATCH_SIZE: i64 = 100;
/// Deliveries of one mailbox per step: fewer mean that it is empty.
const PER_MAILBOX: usize = 500;

pub async fn settle_ended_sessions(engine: &Engine) -> EngineResult<TickOutcome> {
    let emptied = empty_mailboxes(engine).await?;
    let settled = settle_releases(engine).await?;
    Ok(TickOutcome { worked: emptied.worked + settled.worked, more: emptied.more || settled.more, lag: None })
}

async fn empty_mailboxes(engine: &Engine) -> EngineResult<TickOutcome> {
    let orphaned = engine.store().orphaned_mailboxes(BATCH_SIZE).await?;
    if orphaned.is_empty() {
        return Ok(TickOutcome::default());
    }
    let (dead_lettered, recorded) =
        engine.store().dead_letter_mailboxes(&orphaned, DeadLetterReason::SessionGone, engine.now()).await?;
    engine.mailboxes().announce_dead_letters(&dead_lettered, recorded);
    // The bound of a step may have left out any of them.
    let is_cut = dead_lettered.len() >= MAX_DEAD_LETTERED;
    let left = |(scope, agent): &(WorkspaceScope, AgentId)| {
        is_cut
            || dead_lettered
                .iter()
                .filter(|letter| letter.scope == *scope && letter.delivery_id.agent == *agent)
                .count()
                >= PER_MAILBOX
    };
    let (more, empty): (Vec<_>, Vec<_>) = orphaned.iter().copied().partition(left);
    engine.store().mark_orphaned_mailboxes_emptied(&empty).await?;
    let more = !more.is_empty() || i64::try_from(orphaned.len()).unwrap_or(0) == BATCH_SIZE;
    Ok(TickOutcome { worked: dead_lettered.len() as u64, more, lag: None })
}

async fn settle_releases(engine: &Engine) -> EngineResult<TickOutcome> {
    let settled = engine.store().settled_releases(BATCH_SIZE).await?;
    for release in &settled {
        if let (true, Some(name)) = (release.deletes, &release.agent_name) {
            let condition = DeleteCondition {
                agent: Some(release.agent),
                has_ended: true,
                is_release: true,
                unbound_since: release.completed_at,
                orphans_mailbox: true,
                ..DeleteCondition::default()
            };
            match engine.agents().delete_if(release.scope, name, &condition).await {
                // Another process deleted it first, or its node has started it again.
                Ok(()) | Err(EngineError::NotFound(Missing::Agent(_))) => {}
                Err(error) => return Err(error),
            }
        }
        // Last: a process that stops before it leaves the release to the next step.
        engine.store().delete_release(release.scope, release.invocation).await?;
    }
    let more = i64::try_from(settled.len()).unwrap_or(0) == BATCH_SIZE;
    Ok(TickOutcome { worked: settled.len() as u64, more, lag: None })
}
