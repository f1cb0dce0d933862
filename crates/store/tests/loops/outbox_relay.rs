use std::time::Duration;

use crate::fixture::Database;

const PATIENCE: Duration = Duration::from_secs(2);
const CLAIM: Duration = Duration::from_secs(10);

impl Database {
    async fn batch(&self, batch: i64, gateway: i64, age_seconds: f64) {
        self.run(&format!(
            "INSERT INTO outbox (batch_id, gateway_id, sources, traceparent, created_at)
             VALUES ({batch}, {gateway}, '[[7, {batch}]]', '00-tp', now() - make_interval(secs => {age_seconds}))"
        ))
        .await;
    }

    async fn claimed(&self) -> Vec<i64> {
        let batches = self.store.claim_unpublished(PATIENCE, 10, CLAIM).await.unwrap();
        let mut ids: Vec<_> = batches.iter().map(|batch| batch.batch_id.get()).collect();
        ids.sort_unstable();
        ids
    }
}

#[tokio::test]
async fn a_batch_is_relayed_when_it_is_old_or_its_gateway_has_expired() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO gateways (gateway_id, lease_until) VALUES
         (1, now() + interval '1 minute'), (2, now() - interval '1 second')",
    )
    .await;
    db.batch(10, 1, 0.0).await;
    db.batch(11, 1, 3.0).await;
    db.batch(12, 2, 0.0).await;
    db.batch(13, 3, 0.0).await;
    assert_eq!(db.claimed().await, [11, 12, 13], "10 is young, and its gateway lives");
    assert_eq!(db.claimed().await, [] as [i64; 0], "claimed is claimed");

    db.run("UPDATE outbox SET claimed_until = now() - interval '1 second' WHERE batch_id = 12").await;
    let again = db.store.claim_unpublished(PATIENCE, 10, CLAIM).await.unwrap();
    assert_eq!(again.len(), 1, "a lapsed claim is taken again");
    assert_eq!(again[0].sources, [(Database::mailbox(1).0, relay_domain::MessageId::new(12))]);
    assert_eq!((again[0].gateway_id.get(), again[0].traceparent.as_deref()), (2, Some("00-tp")));

    let lag = db.store.outbox_lag().await.unwrap();
    assert_eq!(lag.pending, 4);
    assert!(lag.oldest_seconds >= 3.0);
    let all: Vec<_> = [10, 11, 12, 13].map(relay_domain::BatchId::new).into();
    assert_eq!(db.store.mark_published(&all).await.unwrap(), 4);
    assert_eq!(db.store.mark_published(&all).await.unwrap(), 0);
    let lag = db.store.outbox_lag().await.unwrap();
    assert_eq!((lag.pending, lag.oldest_seconds), (0, 0.0));
}

#[tokio::test]
async fn two_relays_at_once_share_the_batches() {
    let db = Database::fresh().await;
    for batch in 0..30 {
        db.batch(batch, 9, 5.0).await;
    }
    let claim = || db.store.claim_unpublished(PATIENCE, 20, CLAIM);
    let (a, b, c) = tokio::join!(claim(), claim(), claim());
    let mut ids: Vec<_> = [a, b, c].into_iter().flat_map(Result::unwrap).map(|batch| batch.batch_id).collect();
    let claimed = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), claimed, "no batch was claimed twice");
}
