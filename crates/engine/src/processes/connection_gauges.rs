//! Gauges of this process's connections to Postgres and NATS.

use std::{sync::Weak, time::Duration};

use relay_domain::metric_names as name;

use crate::Inner;

/// Shorter than any scrape interval.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Samples until the engine is dropped. It sends nothing to either server.
pub(crate) async fn run(engine: Weak<Inner>) {
    while let Some(inner) = engine.upgrade() {
        let pool = inner.core.store.connections();
        metrics::gauge!(name::DATABASE_CONNECTIONS, "state" => "used").set(pool.used);
        metrics::gauge!(name::DATABASE_CONNECTIONS, "state" => "idle").set(pool.idle);
        metrics::gauge!(name::DATABASE_CONNECTIONS_MAX).set(pool.max);
        metrics::gauge!(name::NATS_CONNECTED).set(u8::from(inner.stream.is_up()));
        // Not held over the pause, so that the engine can be dropped.
        drop(inner);
        tokio::time::sleep(SAMPLE_EVERY).await;
    }
}
