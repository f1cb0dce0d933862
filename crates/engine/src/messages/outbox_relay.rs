//! Outbox relay: publishes commit batches that their gateway did not, because it crashed or NATS was unavailable.

use std::time::Duration;

use relay_domain::metric_names;
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::{Engine, EngineResult, tick::TickOutcome};

/// A gateway publishes its batches within milliseconds. After this long it will not.
const OVERDUE_AFTER: Duration = Duration::from_secs(2);
/// Time for which a claimed batch is left to its worker.
const CLAIM_DURATION: Duration = Duration::from_secs(10);
/// Batches per tick: at 512 deliveries a batch, as many as JetStream takes within a claim.
const MAX_PER_TICK: i64 = 32;

/// Publishes and marks overdue batches. Publishing twice is harmless: JetStream and mailbox streams drop repeated
/// frames.
pub async fn relay_unpublished_batches(engine: &Engine) -> EngineResult<TickOutcome> {
    let lag = engine.store().outbox_lag().await?;
    #[expect(clippy::cast_precision_loss, reason = "counted up to 10 000")]
    metrics::gauge!(metric_names::OUTBOX_PENDING).set(lag.pending as f64);
    metrics::gauge!(metric_names::OUTBOX_LAG_SECONDS).set(lag.oldest_seconds);
    // With NATS unavailable gateways deliver from Postgres; the lag shows the backlog.
    if lag.pending == 0 || !engine.inner.stream.is_up() {
        return Ok(TickOutcome { lag: Some(Duration::from_secs_f64(lag.oldest_seconds)), ..TickOutcome::default() });
    }
    let claimed_at = Instant::now();
    let batches = engine.store().claim_unpublished(OVERDUE_AFTER, MAX_PER_TICK, CLAIM_DURATION).await?;
    let mut published = Vec::with_capacity(batches.len());
    let mut failure = None;
    for batch in &batches {
        // After the claim has expired, another worker may publish the rest.
        if claimed_at.elapsed() >= CLAIM_DURATION || !engine.inner.stream.is_up() {
            break;
        }
        let above = batch.traceparent.as_deref();
        let span =
            relay_trace::child_span(above, || tracing::info_span!("stream.republish", messages = batch.sources.len()));
        let own = span.as_ref().and_then(relay_trace::traceparent_of);
        let republished = engine.messages().republish(&batch.sources, batch.agents, own.as_deref().or(above));
        match republished.instrument(span.unwrap_or_else(tracing::Span::none)).await {
            Ok(()) => published.push(batch.batch_id),
            // A batch that cannot be published must not delay the others; its claim expires.
            Err(error) => failure = Some(error),
        }
    }
    // Marked after JetStream has stored them: a crash in between repeats them, where the reverse would lose them.
    if !published.is_empty() {
        let marked = engine.store().mark_published(&published).await?;
        metrics::counter!(metric_names::OUTBOX_RELAYED).increment(marked);
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(TickOutcome {
            worked: published.len() as u64,
            more: i64::try_from(batches.len()).is_ok_and(|claimed| claimed >= MAX_PER_TICK),
            lag: Some(Duration::from_secs_f64(lag.oldest_seconds)),
        }),
    }
}
