//! What follows the end of an agent's session: its mail becomes dead letters, and who was to be deleted with it is.

use relay_domain::{AgentId, WorkspaceScope, dead_letter::DeadReason};
use relay_store::DeleteIf;

use super::Ticked;
use crate::{Engine, EngineError, EngineResult};

/// Mailboxes, and releases, that one tick deals with.
const AT_ONCE: i64 = 100;
/// Deliveries of one mailbox that one step dead-letters: fewer mean that there are no more.
const PER_MAILBOX: usize = 500;

/// One step of both.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let emptied = empty_mailboxes(engine).await?;
    let settled = settle_releases(engine).await?;
    Ok(Ticked { worked: emptied.worked + settled.worked, more: emptied.more || settled.more, lag: None })
}

async fn empty_mailboxes(engine: &Engine) -> EngineResult<Ticked> {
    let orphaned = engine.store().orphaned_mailboxes(AT_ONCE).await?;
    if orphaned.is_empty() {
        return Ok(Ticked::default());
    }
    let (dead, recorded) =
        engine.store().dead_letter_mailboxes(&orphaned, DeadReason::SessionGone, engine.now()).await?;
    engine.announce_dead_letters(&dead, recorded);
    let left = |(scope, agent): &(WorkspaceScope, AgentId)| {
        dead.iter().filter(|letter| letter.scope == *scope && letter.delivery_id.agent == *agent).count() >= PER_MAILBOX
    };
    let (more, empty): (Vec<_>, Vec<_>) = orphaned.iter().copied().partition(left);
    engine.store().orphaned_mailboxes_emptied(&empty).await?;
    let more = !more.is_empty() || i64::try_from(orphaned.len()).unwrap_or(0) == AT_ONCE;
    Ok(Ticked { worked: dead.len() as u64, more, lag: None })
}

async fn settle_releases(engine: &Engine) -> EngineResult<Ticked> {
    let settled = engine.store().settled_releases(AT_ONCE).await?;
    for release in &settled {
        if let (true, Some(name)) = (release.deletes, &release.agent_name) {
            let only = DeleteIf { agent: Some(release.agent), ended: true, empties: true, ..DeleteIf::default() };
            match engine.delete_agent_if(release.scope, name, &only).await {
                // Somebody else was faster, or runs it again.
                Ok(()) | Err(EngineError::AgentNotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        engine.store().forget_release(release.scope, release.invocation).await?;
    }
    let more = i64::try_from(settled.len()).unwrap_or(0) == AT_ONCE;
    Ok(Ticked { worked: settled.len() as u64, more, lag: None })
}
