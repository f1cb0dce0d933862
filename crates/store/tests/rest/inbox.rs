use relay_domain::{ChannelId, MessageId};

use crate::fixture::{Database, WORKSPACE};

impl Database {
    /// Channel of this number with ada (1) in it.
    async fn joined_channel(&self, channel: i64) {
        self.run(&format!(
            "INSERT INTO channels (workspace_id, channel_id, name, created_at)
             VALUES ({WORKSPACE}, {channel}, 'c{channel}', now());
             INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at)
             VALUES ({WORKSPACE}, {channel}, 1, now())"
        ))
        .await;
    }

    /// The pointers of ada by channel.
    async fn pointers(&self) -> Vec<(i64, i64)> {
        let (scope, ada) = Self::mailbox(1);
        let rows = self.store.read_pointers(scope, ada).await.unwrap();
        let mut pointers: Vec<_> = rows.iter().map(|row| (row.channel_id.get(), row.read_id.get())).collect();
        pointers.sort_unstable();
        pointers
    }
}

#[tokio::test]
async fn acked_messages_are_below_the_pointer_before_and_after_they_are_folded() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    let marks = || async { db.store.read_marks(scope, ada).await.unwrap() };
    let none = marks().await;
    assert_eq!((none.event_head, none.are_complete()), (1, true));
    db.joined_channel(1).await;
    db.joined_channel(2).await;
    db.run(&format!("INSERT INTO event_heads (workspace_id, next_seq) VALUES ({WORKSPACE}, 7)")).await;
    let before = marks().await;
    assert_eq!(before.event_head, 7);
    assert_eq!(db.pointers().await, [(1, 0), (2, 0)]);

    // All are in channel 1. The third expired.
    db.deliveries(1, &[60; 4]).await;
    db.run("UPDATE deliveries SET channel_id = 1").await;
    db.settlement(1, 3, 4).await;
    assert_eq!(marks().await, before, "nothing is read");
    db.ack_floor(1, 3).await;
    assert_ne!(marks().await, before, "an ack that is not folded");
    let message = |seq| ((db.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS) << 22) + seq;
    assert_eq!(db.pointers().await, [(1, message(2)), (2, 0)]);
    db.store.fold_read_pointers(100, db.now).await.unwrap();
    assert_eq!(db.pointers().await, [(1, message(2)), (2, 0)]);
    // An explicit read has moved the pointer further than the acks.
    let before = marks().await;
    db.run(&format!("UPDATE channel_members SET last_read_id = {} WHERE channel_id = 1", message(4))).await;
    assert_ne!(marks().await, before, "an explicit read");
    db.ack_floor(1, 4).await;
    assert_eq!(db.pointers().await, [(1, message(4)), (2, 0)]);
    db.run("UPDATE channels SET archived_at = now() WHERE channel_id = 1").await;
    assert_eq!(db.pointers().await, [(2, 0)]);
}

#[tokio::test]
async fn roots_of_others_above_a_pointer_are_unread() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    for channel in [1, 2, 3] {
        db.joined_channel(channel).await;
    }
    let (scope, ada) = Database::mailbox(1);
    db.deliveries(1, &[60; 6]).await;
    let message = |seq| ((db.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS) << 22) + seq;
    db.run(&format!("UPDATE messages SET agent_id = 1 WHERE message_id IN ({}, {})", message(4), message(6))).await;
    db.run(&format!("UPDATE messages SET thread_id = {} WHERE message_id = {}", message(1), message(5))).await;
    db.run(&format!("UPDATE messages SET channel_id = 2 WHERE message_id = {}", message(6))).await;
    let pointers =
        [(1, message(1)), (2, 0), (3, 0)].map(|(channel, read)| (ChannelId::new(channel), MessageId::new(read)));
    let mut counted = db.store.count_unread(scope, ada, &pointers).await.unwrap();
    counted.sort_unstable_by_key(|row| row.channel_id);
    let shown: Vec<_> = counted
        .iter()
        .map(|row| (row.channel_id, row.read_id))
        .zip(counted.iter().map(|row| &row.unread).map(|unread| (unread.count, unread.oldest_id, unread.newest_id)))
        .collect();
    let (oldest, newest) = (Some(MessageId::new(message(2))), Some(MessageId::new(message(3))));
    let unread = [(2, oldest, newest), (0, None, None), (0, None, None)];
    assert_eq!(shown, pointers.into_iter().zip(unread).collect::<Vec<_>>());
    assert_eq!((counted[0].unread.newest_from.as_deref(), counted[0].unread.newest_bytes), (Some("sender"), Some(2)));
    assert_eq!(counted[1].unread.newest_from, None);
    assert!(db.store.count_unread(scope, ada, &[]).await.unwrap().is_empty());
}
