//! Database cost of a request: the number of statements it waited for, and their duration.
//!
//! Read from the statement events of the database driver, so that callers do not have to count. Statements are counted
//! only within [`measure_cost`]; elsewhere the events are disabled and cost nothing.

use std::cell::Cell;

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    subscriber::Interest,
};
use tracing_subscriber::{Layer, filter::dynamic_filter_fn, layer::Context, registry::LookupSpan};

/// Target of the driver's statement events, by segment.
const STATEMENT: [&str; 2] = ["sqlx", "query"];
/// Target of the engine's event for a commit that carried several requests; `elapsed_secs` is the wait.
const COMMIT: &str = "relay::commit";

tokio::task_local! {
    static COST: Cell<Cost>;
}

/// Database cost of one piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Statements that were awaited; a commit that carried several requests counts as one.
    pub statements: u32,
    /// Their total duration.
    pub seconds: f64,
}

/// Runs the work and returns its cost. Work spawned onto other tasks is not included.
pub async fn measure_cost<T>(work: impl Future<Output = T>) -> (T, Cost) {
    COST.scope(Cell::default(), async {
        let done = work.await;
        (done, COST.with(Cell::get))
    })
    .await
}

/// Creates the layer that counts statements.
pub(crate) fn cost_layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let measured = |metadata: &Metadata<'_>, _: &Context<'_, S>| is_report(metadata) && COST.try_with(|_| ()).is_ok();
    let filter = dynamic_filter_fn(measured)
        // Statements are asked about at each event: whether one counts depends on the task, not on the callsite.
        .with_callsite_filter(
            |metadata: &'static Metadata<'static>| {
                if is_report(metadata) { Interest::sometimes() } else { Interest::never() }
            },
        )
        .with_max_level_hint(LevelFilter::DEBUG);
    StatementCounter.with_filter(filter)
}

fn is_report(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    metadata.is_event() && *metadata.level() <= Level::DEBUG && (target == COMMIT || target.split("::").eq(STATEMENT))
}

struct StatementCounter;

impl<S: Subscriber> Layer<S> for StatementCounter {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut elapsed = ElapsedVisitor(None);
        event.record(&mut elapsed);
        let Some(seconds) = elapsed.0 else { return };
        // Outside of measured work there is nothing to count.
        let _ = COST.try_with(|cost| {
            let Cost { statements, seconds: before } = cost.get();
            cost.set(Cost { statements: statements.saturating_add(1), seconds: before + seconds });
        });
    }
}

/// Reads the duration of a statement event.
struct ElapsedVisitor(Option<f64>);

impl Visit for ElapsedVisitor {
    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "elapsed_secs" {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[tokio::test]
    async fn only_statements_within_measured_work_count() {
        let subscriber = tracing_subscriber::registry().with(cost_layer());
        let _guard = tracing::subscriber::set_default(subscriber);
        let statement = || tracing::debug!(target: concat!("sqlx", "::query"), elapsed_secs = 0.25, "SELECT");
        statement();
        let ((), cost) = measure_cost(async {
            statement();
            tracing::debug!(target: "relay::commit", elapsed_secs = 0.5);
            tracing::debug!(elapsed_secs = 8.0, "something else");
        })
        .await;
        assert_eq!(cost, Cost { statements: 2, seconds: 0.75 });
        assert_eq!(measure_cost(async {}).await.1, Cost::default());
    }
}
