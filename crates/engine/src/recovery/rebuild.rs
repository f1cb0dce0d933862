//! Rebuild of a lost delivery log: unsettled deliveries are published again.

use relay_domain::{
    AgentId, WorkspaceScope,
    mailboxes::{StoredDelivery, delivery::Settlement, stream::Seq},
    metric_names,
};
use relay_store::{mailboxes::replay::MailboxPage, recovery::BEFORE_ALL_MAILBOXES};

use crate::{
    Engine, EngineResult,
    messages::publisher::{Origin, publish_rows},
};

const MAILBOX_BATCH: i64 = 200;
const PAGE: i64 = 50;

/// Publishes all unsettled deliveries. Delivery does not wait for this: replay reads Postgres. Returns false when
/// another process rebuilds or repairs.
pub(super) async fn run(engine: &Engine) -> EngineResult<bool> {
    let Some(lock) = engine.store().try_recovery_lock().await? else { return Ok(false) };
    let outcome = publish_unless_rebuilt(engine).await;
    lock.release().await;
    let published = outcome?;
    if published > 0 {
        tracing::info!(published, "rebuilt the empty delivery log");
    }
    metrics::counter!(metric_names::DELIVERIES_REBUILT).increment(published);
    Ok(true)
}

async fn publish_unless_rebuilt(engine: &Engine) -> EngineResult<u64> {
    // Another process may have rebuilt it before we got the lock.
    if engine.inner.stream.is_rebuilt().await? {
        return Ok(0);
    }
    let published = publish_all(engine).await?;
    // Only after all of them: a crash before makes another process publish again, and JetStream drops the frames that
    // it has.
    engine.inner.stream.mark_rebuilt().await?;
    Ok(published)
}

async fn publish_all(engine: &Engine) -> EngineResult<u64> {
    let origin = Origin { epoch: engine.store().known_epoch(), traceparent: None };
    let mut published = 0;
    let mut after = BEFORE_ALL_MAILBOXES;
    loop {
        let busy = engine.store().busy_mailboxes(after, MAILBOX_BATCH).await?;
        let Some((scope, agent, _)) = busy.last() else { return Ok(published) };
        after = (scope.workspace_id(), *agent);
        let mut wants: Vec<(WorkspaceScope, AgentId, Seq)> =
            busy.iter().map(|(scope, agent, floor)| (*scope, *agent, floor + 1)).collect();
        while !wants.is_empty() {
            let pages = engine.store().mailbox_pages(&wants, PAGE, engine.now()).await?;
            // Before settled rows are left out: the number of rows shows whether a page was full.
            wants = next_pages(&pages);
            let pending: Vec<_> = pages.into_iter().flat_map(|page| page.rows).filter(is_pending).collect();
            published += pending.len() as u64;
            publish_rows(engine.core(), &engine.inner.stream, pending, origin).await?;
        }
    }
}

fn is_pending(row: &StoredDelivery) -> bool {
    !row.settlement.is_some_and(Settlement::is_settled)
}

/// Returns the next positions of mailboxes whose page was full.
fn next_pages(pages: &[MailboxPage]) -> Vec<(WorkspaceScope, AgentId, Seq)> {
    let rows = usize::try_from(PAGE).unwrap_or(usize::MAX);
    let full = pages.iter().filter(|page| page.rows.len() >= rows);
    full.filter_map(|page| Some((page.scope, page.agent_id, page.rows.last()?.seq + 1))).collect()
}
