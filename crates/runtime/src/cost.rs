//! What a request costs in the database: how many statements it waited for, and how long.
//!
//! Read from what the driver reports of each statement, so that no caller of it has to count. Statements are
//! reported within [`measured`] only; elsewhere they cost nothing.

use std::cell::Cell;

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    subscriber::Interest,
};
use tracing_subscriber::{Layer, filter::dynamic_filter_fn, layer::Context, registry::LookupSpan};

/// What the driver calls its reports, segment by segment.
const STATEMENT: [&str; 2] = ["sqlx", "query"];
/// What the engine calls a wait for a commit that carries several requests: `elapsed_secs` says how long.
const COMMIT: &str = "relay::commit";

tokio::task_local! {
    static COST: Cell<Cost>;
}

/// What something cost in the database.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Statements that were waited for; a commit that carried several requests counts as one.
    pub statements: u32,
    /// How long they took together.
    pub seconds: f64,
}

/// Does the work and tells what it cost. What it leaves to other tasks is not in it.
pub async fn measured<T>(work: impl Future<Output = T>) -> (T, Cost) {
    COST.scope(Cell::default(), async {
        let done = work.await;
        (done, COST.with(Cell::get))
    })
    .await
}

/// Takes the reports in.
pub(crate) fn layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let measured = |metadata: &Metadata<'_>, _: &Context<'_, S>| is_report(metadata) && COST.try_with(|_| ()).is_ok();
    let filter = dynamic_filter_fn(measured)
        .with_callsite_filter(
            |metadata: &'static Metadata<'static>| {
                if is_report(metadata) { Interest::sometimes() } else { Interest::never() }
            },
        )
        .with_max_level_hint(LevelFilter::DEBUG);
    Statements.with_filter(filter)
}

fn is_report(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    metadata.is_event() && *metadata.level() <= Level::DEBUG && (target == COMMIT || target.split("::").eq(STATEMENT))
}

struct Statements;

impl<S: Subscriber> Layer<S> for Statements {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut elapsed = Elapsed(None);
        event.record(&mut elapsed);
        let Some(seconds) = elapsed.0 else { return };
        // Outside of a measured request there is nobody to tell.
        let _ = COST.try_with(|cost| {
            let Cost { statements, seconds: before } = cost.get();
            cost.set(Cost { statements: statements.saturating_add(1), seconds: before + seconds });
        });
    }
}

/// The one field that counts.
struct Elapsed(Option<f64>);

impl Visit for Elapsed {
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
    async fn statements_within_count_and_others_do_not() {
        let subscriber = tracing_subscriber::registry().with(layer());
        let _guard = tracing::subscriber::set_default(subscriber);
        let statement = || tracing::debug!(target: concat!("sqlx", "::query"), elapsed_secs = 0.25, "SELECT");
        statement();
        let ((), cost) = measured(async {
            statement();
            tracing::debug!(target: "relay::commit", elapsed_secs = 0.5);
            tracing::debug!(elapsed_secs = 8.0, "something else");
        })
        .await;
        assert_eq!(cost, Cost { statements: 2, seconds: 0.75 });
        assert_eq!(measured(async {}).await.1, Cost::default());
    }
}
