//! A log that was lost: whatever still waits for its recipient is put into the new one.

use relay_domain::{AgentId, WorkspaceScope, delivery::Exception, metric_names, session::Seq};
use relay_store::replay::StoredDelivery;

use crate::{Engine, EngineResult, publish::log_frame};

/// Mailboxes read at once.
const MAILBOXES: i64 = 200;
/// Rows that have expired are in older partitions.
const OLDEST_LIVE_ROW: chrono::Duration = chrono::Duration::days(7);

/// Publishes all unsettled deliveries. Delivery does not wait for it: replay reads Postgres. `false` when another
/// process is at it, or recovers.
pub(super) async fn run(engine: &Engine) -> EngineResult<bool> {
    let Some(lock) = engine.store().try_recovery_lock().await? else { return Ok(false) };
    let outcome = publish_unless_rebuilt(engine).await;
    lock.release().await;
    let published = outcome?;
    if published > 0 {
        tracing::info!(published, "the delivery log was new and has been rebuilt");
    }
    metrics::counter!(metric_names::DELIVERIES_REBUILT).increment(published);
    Ok(true)
}

async fn publish_unless_rebuilt(engine: &Engine) -> EngineResult<u64> {
    // Somebody else may have done it before we had the lock.
    if engine.inner.stream.is_rebuilt().await? {
        return Ok(0);
    }
    let published = publish_all(engine).await?;
    engine.inner.stream.mark_rebuilt().await?;
    Ok(published)
}

async fn publish_all(engine: &Engine) -> EngineResult<u64> {
    let mut published = 0;
    let mut after = (0, 0);
    loop {
        let busy = engine.store().busy_mailboxes(after, MAILBOXES).await?;
        let Some((scope, agent, _)) = busy.last() else { return Ok(published) };
        after = (scope.workspace_id().get(), agent.get());
        let mut wants: Vec<(WorkspaceScope, AgentId, Seq)> =
            busy.iter().map(|(scope, agent, floor)| (*scope, *agent, floor + 1)).collect();
        while !wants.is_empty() {
            let rows = engine.store().deliveries_from(&wants, engine.now() - OLDEST_LIVE_ROW).await?;
            let frames: Vec<_> = rows.iter().filter(|row| waits(row)).filter_map(|row| log_frame(row, None)).collect();
            engine.inner.stream.publish(&frames).await?.wait().await?;
            published += frames.len() as u64;
            wants = next_pages(&rows);
        }
    }
}

fn waits(row: &StoredDelivery) -> bool {
    row.exception.is_none_or(|exception| matches!(exception, Exception::Deferred))
}

/// Where mailboxes go on that gave a full page.
fn next_pages(rows: &[StoredDelivery]) -> Vec<(WorkspaceScope, AgentId, Seq)> {
    let page = usize::try_from(relay_store::replay::PAGE).unwrap_or(usize::MAX);
    let mailboxes = rows.chunk_by(|a, b| (a.scope, a.agent_id) == (b.scope, b.agent_id));
    let full = mailboxes.filter(|rows| rows.len() >= page).filter_map(|rows| rows.last());
    full.map(|row| (row.scope, row.agent_id, row.seq + 1)).collect()
}
