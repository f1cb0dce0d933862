//! A stored value that its type does not have is an error that names the row, never a default.

use relay_domain::ChannelId;
use relay_store::{StoreError, channels::audience::AudienceKey, mailboxes::dead_letters::DeadLetterFilter};

use crate::fixture::Database;

const ADA: i64 = 1;

/// Table, column and row of a corrupt value.
fn place<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> (&'static str, String, String) {
    match answer {
        Err(StoreError::Corrupt { table, column, row, .. }) => (table, column, row),
        other => panic!("not corrupt: {other:?}"),
    }
}

#[tokio::test]
async fn an_unknown_settlement_is_corrupt() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.run("ALTER TABLE delivery_exceptions DROP CONSTRAINT exception_state_is_known").await;
    db.settlement(ADA, 1, 9).await;
    let (scope, agent) = Database::mailbox(ADA);
    let answer = db.store.mailbox_pages(&[(scope, agent, 1)], 50, db.now).await;
    let (table, column, row) = place(answer);
    assert_eq!((table, column.as_str()), ("deliveries", "state"));
    assert!(row.starts_with("workspace_id=7 agent_id=1") && row.contains(" seq=1 "), "{row}");
}

#[tokio::test]
async fn an_unknown_kind_of_channel_is_corrupt() {
    let db = Database::fresh().await;
    db.run(
        "ALTER TABLE channels DROP CONSTRAINT conversation_id_iff_conversation;
         INSERT INTO channels (workspace_id, channel_id, name, type, created_at) VALUES (7, 5, 'room', 9, now())",
    )
    .await;
    let (scope, _) = Database::mailbox(ADA);
    let (table, column, row) = place(db.store.audience(scope, &AudienceKey::Id(ChannelId::new(5))).await);
    assert_eq!((table, column.as_str()), ("channels", "type"));
    assert!(row.contains("channel_id=5") && row.contains("name=room"), "{row}");
}

#[tokio::test]
async fn a_position_of_a_loop_that_does_not_decode_is_corrupt() {
    let db = Database::fresh().await;
    db.run(
        r#"INSERT INTO loop_state VALUES ('read_receipts', '{"day": "never"}', now()), ('read_pointers_feed', '7', now()),
                                         ('expiry', '{"until": "never"}', now())"#,
    )
    .await;
    let receipts = ("loop_state", "value".to_owned(), "name=read_receipts".to_owned());
    let pointers = ("loop_state", "value".to_owned(), "name=read_pointers_feed".to_owned());
    let expiry = ("loop_state", "value".to_owned(), "name=expiry".to_owned());
    assert_eq!(place(db.store.first_unfolded_day().await), receipts);
    assert_eq!(place(db.store.expiry_lag(db.now).await), expiry);
    assert_eq!(place(db.store.fold_read_pointers(10, db.now).await), pointers);
}

#[tokio::test]
async fn an_unknown_reason_of_a_dead_letter_is_corrupt() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.settlement(ADA, 1, 4).await;
    db.run("UPDATE delivery_exceptions SET reason = 'tired'").await;
    let (scope, _) = Database::mailbox(ADA);
    let (table, column, row) = place(db.store.dead_letters(scope, &DeadLetterFilter::default(), None, 10).await);
    // A statement whose rows decode as a whole names itself.
    assert_eq!((table, column.as_str(), row.as_str()), ("listing dead letters", "reason", "unknown"));
}
