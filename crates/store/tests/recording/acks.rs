use relay_domain::{DeliveryId, NodeId, ProviderName, SourceId, mailboxes::DeliveryReport};
use relay_store::{
    events::Event,
    mailboxes::cursors::{CursorMove, LockedCursors},
};
use serde_json::json;

use crate::fixture::Database;

const ADA: i64 = 1;

impl Database {
    fn ack(&self, agent: i64, sent_seq: i64, acked_seq: i64) -> CursorMove {
        let (scope, agent_id) = Self::mailbox(agent);
        let (node_id, provider) = (NodeId::direct(agent_id), ProviderName::new("default"));
        CursorMove { scope, agent_id, node_id, provider, sent_seq, acked_seq, epoch: None }
    }

    async fn watched(&self) {
        let (scope, _) = Self::mailbox(ADA);
        self.store.watch_events(&[scope], 10).await.unwrap();
    }

    fn id(&self, agent: i64, seq: i64) -> DeliveryId {
        let made_ms = self.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS;
        DeliveryId { source: SourceId::new((made_ms << 22) + seq), agent: Self::mailbox(agent).1, redrive_no: 0 }
    }
}

async fn mailbox_of(rows: usize) -> Database {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &vec![60; rows]).await;
    db.run("INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'general', now())").await;
    db.run("UPDATE deliveries SET channel_id = 1").await;
    db
}

#[tokio::test]
async fn acks_are_recorded_only_while_the_workspace_is_watched() {
    let db = mailbox_of(6).await;
    let flushed = db.store.flush_cursors(&[db.ack(ADA, 2, 2)], LockedCursors::Wait, db.now).await.unwrap();
    assert_eq!((flushed.acked, flushed.recorded.len()), (2, 0));
    assert_eq!(db.number("SELECT count(*) FROM event_log").await, 0);

    db.watched().await;
    let (scope, ada) = Database::mailbox(ADA);
    let report = db.store.report_delivery(scope, db.id(ADA, 4), &DeliveryReport::Ack, db.now, |_| {
        vec![Event::new("delivery.delivered", json!({}))]
    });
    assert!(report.await.unwrap().flatten().is_some());
    db.settlement(ADA, 5, 4).await;
    let flushed = db.store.flush_cursors(&[db.ack(ADA, 6, 6)], LockedCursors::Wait, db.now).await.unwrap();
    assert_eq!(flushed.acked, 4);
    let events: Vec<_> = flushed.recorded.iter().flat_map(|recorded| &recorded.events).collect();
    let reported: Vec<_> =
        events.iter().map(|event| (&*event.kind, event.agent_id, event.channel_name.as_deref())).collect();
    let delivered = ("delivery.delivered", Some(ada), Some("general"));
    assert_eq!(reported, [delivered, delivered], "4 had its event by REST, 5 is a dead letter");
    let ids: Vec<_> = [3, 6].map(|seq| db.id(ADA, seq).to_string()).into();
    let data: Vec<_> = sqlx::query_scalar::<_, String>(
        "SELECT e -> 'd' ->> 'delivery_id' FROM event_log l, json_array_elements(l.events) AS e
          WHERE l.first_seq > 1 ORDER BY l.last_seq",
    )
    .fetch_all(&db.pool)
    .await
    .unwrap();
    assert_eq!(data, ids);
    assert_eq!(db.number("SELECT ack_floor FROM mailbox_cursors WHERE agent_id = 1").await, 6);

    let again = db.store.flush_cursors(&[db.ack(ADA, 6, 6)], LockedCursors::Wait, db.now).await.unwrap();
    assert_eq!((again.acked, again.recorded.len()), (0, 0), "an ack is recorded once");
    assert!(flushed.recorded[0].watched);
}

#[tokio::test]
async fn a_flush_of_many_acks_records_a_bounded_number_and_moves_all_floors() {
    let db = mailbox_of(700).await;
    db.agent(2, "bob").await;
    db.deliveries(2, &[60; 700]).await;
    db.agent(3, "cyd").await;
    db.deliveries(3, &[60]).await;
    db.watched().await;
    let moves = [db.ack(ADA, 700, 700), db.ack(2, 700, 700), db.ack(3, 1, 1)];
    let flushed = db.store.flush_cursors(&moves, LockedCursors::Wait, db.now).await.unwrap();
    assert_eq!(flushed.acked, 1401);
    assert_eq!(flushed.recorded.iter().map(|recorded| recorded.events.len()).sum::<usize>(), 1000);
    assert_eq!(db.number("SELECT min(ack_floor) FROM mailbox_cursors WHERE agent_id IN (1, 2)").await, 700);
}

#[tokio::test]
async fn a_locked_cursor_delays_no_other_mailbox() {
    let db = mailbox_of(2).await;
    for (agent, name) in [(2, "bob"), (3, "cyd")] {
        db.agent(agent, name).await;
        db.deliveries(agent, &[60]).await;
    }
    db.run("UPDATE agents SET node_id = 'elsewhere' WHERE agent_id = 3").await;
    let (scope, ada) = Database::mailbox(ADA);
    let moves = [db.ack(ADA, 2, 2), db.ack(2, 1, 1), db.ack(3, 1, 1)];
    let floor = |agent: i64| format!("SELECT ack_floor FROM mailbox_cursors WHERE agent_id = {agent}");
    for watched in [false, true] {
        db.run("UPDATE mailbox_cursors SET ack_floor = 0, settled_floor = 0").await;
        if watched {
            db.watched().await;
        }
        let mut held = db.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM mailbox_cursors WHERE agent_id = 1 FOR UPDATE").execute(&mut *held).await.unwrap();
        let flushed = db.store.flush_cursors(&moves, LockedCursors::Skip, db.now).await.unwrap();
        assert_eq!(
            (flushed.acked, &*flushed.skipped),
            (1, &[(scope, ada)][..]),
            "what another location acked is dropped"
        );
        assert_eq!((db.number(&floor(ADA)).await, db.number(&floor(2)).await), (0, 1));
        held.rollback().await.unwrap();
        let flushed = db.store.flush_cursors(&moves, LockedCursors::Skip, db.now).await.unwrap();
        assert_eq!((flushed.acked, flushed.skipped.len()), (2, 0));
        assert_eq!(db.number(&floor(ADA)).await, 2);
    }
}
