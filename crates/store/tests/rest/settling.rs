use chrono::{TimeDelta, Utc};
use relay_domain::{
    AgentId, ClaimId, DeliveryId, SourceId,
    mailboxes::{DeliveryReport, delivery::DeliveryState},
};
use relay_store::{
    ReportOutcome,
    events::Event,
    mailboxes::claims::{ClaimOutcome, NewClaim},
};

use crate::fixture::Database;

const ADA: i64 = 1;

impl Database {
    fn delivery_id(&self, seq: i64) -> DeliveryId {
        let made_ms = self.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS;
        DeliveryId { source: SourceId::new((made_ms << 22) + seq), agent: AgentId::new(ADA), redrive_no: 0 }
    }

    async fn report(&self, seq: i64, report: DeliveryReport) -> Option<bool> {
        let (scope, _) = Self::mailbox(ADA);
        let events = |_: &ReportOutcome| vec![Event::new("delivery", serde_json::json!({}))];
        let reported = self.store.report_delivery(scope, self.delivery_id(seq), &report, self.now, events);
        reported.await.unwrap().map(|changed| changed.is_some())
    }

    async fn mark_read(
        &self,
        scope: relay_domain::WorkspaceScope,
        message: relay_domain::MessageId,
        agent: AgentId,
    ) -> relay_store::StoreResult<Option<relay_store::ReadReceipt>> {
        let event = |_, _| Event::new("message.read", serde_json::json!({}));
        self.store.mark_read(scope, message, agent, self.now, event).await
    }

    async fn state(&self, seq: i64) -> DeliveryState {
        let (scope, _) = Self::mailbox(ADA);
        self.store.delivery(scope, self.delivery_id(seq)).await.unwrap().unwrap().state()
    }

    async fn listed(&self, status: Option<DeliveryState>) -> Vec<i64> {
        let (scope, ada) = Self::mailbox(ADA);
        self.store.deliveries(scope, ada, status, 100).await.unwrap().iter().map(|(row, _)| row.seq).collect()
    }
}

fn fail() -> DeliveryReport {
    DeliveryReport::Fail { error: Some("no".into()), retryable: None }
}

#[expect(clippy::disallowed_methods, reason = "tests run on this machine's clock")]
fn defer() -> DeliveryReport {
    DeliveryReport::Defer { available_at: Utc::now() + TimeDelta::seconds(30), reason: Some("busy".into()) }
}

async fn mailbox_of(lives: &[i64]) -> Database {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, lives).await;
    db
}

#[tokio::test]
async fn the_settled_floor_moves_over_contiguous_settled_rows_only() {
    let db = mailbox_of(&[60; 5]).await;
    assert_eq!(db.report(2, DeliveryReport::Ack).await, Some(true));
    assert_eq!(db.settled_floor(ADA).await, 0, "1 is open");
    assert_eq!(db.report(1, fail()).await, Some(true));
    assert_eq!(db.settled_floor(ADA).await, 2);
    assert_eq!(db.report(3, defer()).await, Some(true));
    assert_eq!(db.report(4, DeliveryReport::Ack).await, Some(true));
    assert_eq!(db.settled_floor(ADA).await, 2, "a deferred row is not settled");
    assert_eq!(db.report(3, DeliveryReport::Ack).await, Some(true));
    assert_eq!(db.settled_floor(ADA).await, 4);
}

#[tokio::test]
async fn a_settled_delivery_stays_and_is_answered_as_unchanged() {
    let db = mailbox_of(&[60; 3]).await;
    assert_eq!(db.report(1, DeliveryReport::Ack).await, Some(true));
    for report in [DeliveryReport::Ack, fail(), defer()] {
        assert_eq!(db.report(1, report).await, Some(false));
    }
    assert_eq!(db.report(2, fail()).await, Some(true));
    assert_eq!(db.settled_floor(ADA).await, 2);
    assert_eq!(db.report(2, defer()).await, Some(false), "the floor has passed it: that would be a redrive");
    assert_eq!(db.report(2, DeliveryReport::Ack).await, Some(true), "a failed row may still be acked");
    assert_eq!(db.report(9, DeliveryReport::Ack).await, None);
    let at = defer();
    assert_eq!(db.report(3, at.clone()).await, Some(true));
    assert_eq!(db.report(3, at).await, Some(false), "the same deferral again");
}

#[tokio::test]
async fn a_rest_ack_reads_the_message_and_leaves_the_ack_floor() {
    let db = mailbox_of(&[60; 2]).await;
    db.run(
        "INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'general', now());
            INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at) VALUES (7, 1, 1, now())",
    )
    .await;
    assert_eq!(db.report(2, DeliveryReport::Ack).await, Some(true));
    let (reads, last): (i64, Option<i64>) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM message_reads WHERE workspace_id = 7 AND agent_id = 1),
                (SELECT last_read_id FROM channel_members WHERE workspace_id = 7 AND agent_id = 1)",
    )
    .fetch_one(&db.pool)
    .await
    .unwrap();
    assert_eq!((reads, last), (1, Some(db.delivery_id(2).source.get())));
    let floor: i64 = sqlx::query_scalar("SELECT ack_floor FROM mailbox_cursors WHERE agent_id = 1")
        .fetch_one(&db.pool)
        .await
        .unwrap();
    assert_eq!(floor, 0);

    // Reading an older message acks its delivery, and does not move the pointer back.
    let (scope, ada) = Database::mailbox(ADA);
    let older = db.delivery_id(1).source.message_id();
    let read = db.mark_read(scope, older, ada).await.unwrap().unwrap();
    assert!(read.settled);
    assert_eq!(db.settled_floor(ADA).await, 2);
    let again = db.mark_read(scope, older, ada).await.unwrap().unwrap();
    assert_eq!((again.settled, again.read_at), (false, read.read_at), "one receipt");
    let last: i64 = sqlx::query_scalar("SELECT last_read_id FROM channel_members WHERE agent_id = 1")
        .fetch_one(&db.pool)
        .await
        .unwrap();
    assert_eq!(last, db.delivery_id(2).source.get());
    let stranger = AgentId::new(crate::fixture::SENDER);
    assert!(db.mark_read(scope, older, stranger).await.unwrap().is_none(), "not a member");
}

#[tokio::test]
async fn lists_show_each_row_in_its_state_oldest_first() {
    // 1 acked by the floor, 2 dead below it, 3 failed, 4 sent, 5 deferred, 6 acked by REST, 7 queued, 8 expired.
    let db = mailbox_of(&[60, 60, 60, 60, 60, 60, 60, -1]).await;
    db.ack_floor(ADA, 2).await;
    db.run("UPDATE mailbox_cursors SET sent_seq = 5 WHERE agent_id = 1").await;
    for (seq, state) in [(2, 4), (3, 2), (5, 3), (6, 1)] {
        db.settlement(ADA, seq, state).await;
    }
    use DeliveryState as S;
    for (status, expected) in [
        (None, vec![4, 5, 7]),
        (Some(S::Queued), vec![5, 7]),
        (Some(S::Delivered), vec![4]),
        (Some(S::Acked), vec![1, 6]),
        (Some(S::Failed), vec![3]),
        (Some(S::DeadLettered), vec![2]),
    ] {
        assert_eq!(db.listed(status).await, expected, "{status:?}");
        for seq in expected {
            let state = db.state(seq).await;
            assert!(status.is_none_or(|status| status == state), "{seq} is {state}");
        }
    }
}

#[tokio::test]
async fn a_claimed_delivery_that_was_deferred_is_available_when_its_deferral_ends() {
    let db = mailbox_of(&[600]).await;
    db.run(
        "INSERT INTO nodes (workspace_id, node_id, name, kind, created_at)
         SELECT workspace_id, 'queue', 'queue', 'poll', now() FROM agents WHERE name = 'ada';
         UPDATE agents SET node_id = 'queue' WHERE name = 'ada'",
    )
    .await;
    let (scope, ada) = Database::mailbox(ADA);
    let lease = std::time::Duration::from_secs(60);
    let claim = |id| NewClaim { agent: ada, token_generation: 1, claim_id: ClaimId::new(id), limit: 10, lease };
    let ClaimOutcome::Claimed(claimed) = db.store.claim_deliveries(scope, claim(1)).await.unwrap() else { panic!() };
    assert_eq!(claimed.len(), 1);
    db.report(1, defer()).await;
    let ClaimOutcome::Empty { next_at } = db.store.claim_deliveries(scope, claim(2)).await.unwrap() else { panic!() };
    let seconds = (next_at.unwrap() - db.now).num_seconds();
    assert!((20..=60).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn reports_on_one_mailbox_at_once_lose_nothing() {
    let db = mailbox_of(&[60; 40]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for seq in (1..=40).rev() {
        let (store, id, now) = (db.store.clone(), db.delivery_id(seq), db.now);
        let (scope, _) = Database::mailbox(ADA);
        let event = Event::new("delivery", serde_json::json!({}));
        tasks.spawn(async move { store.report_delivery(scope, id, &DeliveryReport::Ack, now, |_| vec![event]).await });
    }
    while let Some(done) = tasks.join_next().await {
        assert!(done.unwrap().unwrap().flatten().is_some());
    }
    assert_eq!(db.settled_floor(ADA).await, 40);
    assert_eq!(db.number("SELECT next_seq FROM event_heads").await, 41);
}
