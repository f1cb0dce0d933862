//! Commit batches that their gateway did not publish: it died, or NATS was away.

use std::time::{Duration, Instant};

use relay_domain::metric_names;
use tracing::Instrument as _;

use super::Ticked;
use crate::{Engine, EngineResult, trace};

/// A gateway publishes what it committed within milliseconds. After this long it is not going to.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a claimed batch is left to the worker that claimed it.
const CLAIM: Duration = Duration::from_secs(10);
/// Batches of one tick: at 512 deliveries a batch, what JetStream takes within a claim.
const PER_TICK: i64 = 32;

/// Publishes and marks what is overdue. Publishing twice is harmless: JetStream drops what it has, and
/// sessions drop what they have sent.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let lag = engine.store().outbox_lag().await?;
    #[expect(clippy::cast_precision_loss, reason = "counted up to 10 000")]
    metrics::gauge!(metric_names::OUTBOX_PENDING).set(lag.pending as f64);
    metrics::gauge!(metric_names::OUTBOX_LAG_SECONDS).set(lag.oldest_seconds);
    // With NATS away gateways deliver from Postgres; the lag tells how much is to be published later.
    if lag.pending == 0 || !engine.inner.stream.is_up() {
        return Ok(Ticked { lag: Some(Duration::from_secs_f64(lag.oldest_seconds)), ..Ticked::default() });
    }
    let claimed_at = Instant::now();
    let batches = engine.store().claim_unpublished(PATIENCE, PER_TICK, CLAIM).await?;
    let mut published = Vec::with_capacity(batches.len());
    let mut failure = None;
    for batch in &batches {
        // What is left when the claim lapses, another worker may be at already.
        if claimed_at.elapsed() >= CLAIM || !engine.inner.stream.is_up() {
            break;
        }
        let above = batch.traceparent.as_deref();
        let span = trace::below(above, || tracing::info_span!("stream.republish", messages = batch.sources.len()));
        let own = span.as_ref().and_then(trace::of);
        let republished = engine.republish(&batch.sources, own.as_deref().or(above));
        match republished.instrument(span.unwrap_or_else(tracing::Span::none)).await {
            Ok(()) => published.push(batch.batch_id),
            // One batch that cannot be published must not hold up the others; its claim lapses.
            Err(error) => failure = Some(error),
        }
    }
    if !published.is_empty() {
        let marked = engine.store().mark_relayed(&published).await?;
        metrics::counter!(metric_names::OUTBOX_RELAYED).increment(marked);
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(Ticked {
            worked: published.len() as u64,
            more: i64::try_from(batches.len()).is_ok_and(|claimed| claimed >= PER_TICK),
            lag: Some(Duration::from_secs_f64(lag.oldest_seconds)),
        }),
    }
}
