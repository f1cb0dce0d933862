use std::time::Duration;

use crate::fixture::Database;

const DAY: Duration = Duration::from_secs(86400);
const QUARTER: Duration = Duration::from_secs(900);
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn old_rows_go_and_young_ones_stay() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
         SELECT 7, decode(lpad(n::text, 4, '0'), 'hex'), '', 201, '{}', now() - make_interval(hours => n)
           FROM generate_series(20, 29) AS n;
         INSERT INTO outbox (batch_id, gateway_id, sources, created_at, published_at)
         SELECT n, 1, '[]', now() - interval '1 day', now() - make_interval(mins => n)
           FROM generate_series(10, 19) AS n;
         INSERT INTO outbox (batch_id, gateway_id, sources, created_at) VALUES (1, 1, '[]', now() - interval '9 days');
         UPDATE worker_ids SET owner = 'a', lease_until = now() - interval '2 hours' WHERE worker_id = 1;
         UPDATE worker_ids SET owner = 'b', lease_until = now() - interval '1 minute' WHERE worker_id = 2",
    )
    .await;
    assert_eq!(db.store.prune_idempotency_keys(DAY, 3).await.unwrap(), 3, "bounded");
    assert_eq!(db.store.prune_idempotency_keys(DAY, 100).await.unwrap(), 3);
    assert_eq!(db.store.prune_outbox(QUARTER, 100).await.unwrap(), 5);
    assert_eq!(db.number("SELECT count(*) FROM outbox WHERE published_at IS NULL").await, 1, "never the unpublished");
    assert_eq!(db.store.prune_worker_ids(HOUR).await.unwrap(), 1);
    assert_eq!(db.store.prune_worker_ids(HOUR).await.unwrap(), 0);
}
