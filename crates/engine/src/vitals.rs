//! How this process' connections to Postgres and NATS stand, as gauges.

use std::{sync::Weak, time::Duration};

use relay_domain::metric_names as name;

use crate::Inner;

/// Nobody scrapes more often.
const EVERY: Duration = Duration::from_secs(1);

/// Tells until the engine is gone. It asks neither server.
pub(crate) async fn run(engine: Weak<Inner>) {
    while let Some(inner) = engine.upgrade() {
        let pool = inner.store.connections();
        metrics::gauge!(name::DATABASE_CONNECTIONS, "state" => "used").set(pool.used);
        metrics::gauge!(name::DATABASE_CONNECTIONS, "state" => "idle").set(pool.idle);
        metrics::gauge!(name::DATABASE_CONNECTIONS_MAX).set(pool.max);
        metrics::gauge!(name::NATS_CONNECTED).set(u8::from(inner.stream.is_up()));
        drop(inner);
        tokio::time::sleep(EVERY).await;
    }
}
