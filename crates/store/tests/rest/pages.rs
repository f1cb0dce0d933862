use chrono::{Days, TimeDelta};
use relay_domain::{AgentId, ChannelId, MessageId, messages::MessagePage, observers::ObserverFilters, snowflake};
use relay_store::messages::pages::{ChannelKey, ChannelPage, ChannelPageQuery};

use crate::fixture::{Database, SENDER, WORKSPACE};

const ALL: MessagePage = MessagePage { before: None, after: None, limit: 50 };
const LARGE: usize = 64 * 1024;

impl Database {
    /// Channel 1, older than all of its messages, with ada (1) in it.
    async fn channel() -> Self {
        let db = Self::fresh().await;
        db.agent(1, "ada").await;
        db.run(&format!(
            "INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES ({WORKSPACE}, 1, 'room', now());
             INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at) VALUES ({WORKSPACE}, 1, 1, now())"
        ))
        .await;
        db
    }

    /// Posts a message so many days ago, to a thread or as a root. Returns its id.
    async fn post_days_ago(&self, days: u64, number: i64, thread: Option<i64>) -> i64 {
        let at = self.now - Days::new(days) + TimeDelta::milliseconds(number);
        let (id, day) = (snowflake::first_id_at(at.timestamp_millis()), at.date_naive());
        let (table, next) = (format!("messages_{}", day.format("%Y%m%d")), day + Days::new(1));
        let thread = thread.map_or_else(|| "NULL".to_owned(), |root| root.to_string());
        self.run(&format!(
            "CREATE TABLE IF NOT EXISTS {table} PARTITION OF messages FOR VALUES FROM ('{day}') TO ('{next}');
             INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, thread_id, text,
                                   created_at)
             VALUES ({WORKSPACE}, {id}, '{day}', 1, {SENDER}, 'sender', {thread}, 'hi', '{at}')"
        ))
        .await;
        id
    }

    async fn page(
        &self,
        channel: ChannelKey<'_>,
        page: MessagePage,
        max_bytes: impl Into<Option<usize>>,
    ) -> Option<ChannelPage> {
        let (scope, _) = Self::mailbox(1);
        let (filters, max_bytes) = (&ObserverFilters::default(), max_bytes.into());
        let query = ChannelPageQuery { channel, page, filters, at: self.now, max_bytes };
        self.store.channel_page(scope, &query).await.unwrap()
    }
}

/// Returns the ids of the messages with contents, and of the others.
fn ids(page: &ChannelPage) -> (Vec<MessageId>, Vec<MessageId>) {
    let read = page.messages.iter().map(|listed| listed.message.id).collect();
    (read, page.rest.iter().map(|(id, _)| *id).collect())
}

#[tokio::test]
async fn a_page_continues_from_the_last_days_into_older_ones() {
    let db = Database::channel().await;
    let mut posted = Vec::new();
    for (number, days) in (0..).zip([40, 5, 5, 2, 1, 1, 0, 0]) {
        posted.push(MessageId::new(db.post_days_ago(days, number, None).await));
    }
    let newest = db.page(ChannelKey::Name("room"), ALL, LARGE).await.unwrap();
    posted.reverse();
    assert_eq!(ids(&newest), (posted[..4].to_vec(), posted[4..].to_vec()), "of the last days with their contents");

    let (scope, _) = Database::mailbox(1);
    let cursors = || posted.iter().copied().map(Some).chain([None]);
    for limit in 1..=9 {
        for (before, after) in cursors().flat_map(|before| cursors().map(move |after| (before, after))) {
            let page = MessagePage { before, after, limit };
            let of_all_days =
                db.store.channel_messages(scope, ChannelId::new(1), page, &ObserverFilters::default()).await.unwrap();
            let expected: Vec<_> = of_all_days.into_iter().map(|(id, _)| id).collect();
            for max_bytes in [None, Some(LARGE)] {
                let found = db.page(ChannelKey::Name("room"), page, max_bytes).await.unwrap();
                let (read, rest) = ids(&found);
                assert_eq!([read, rest].concat(), expected, "{page:?} {max_bytes:?}");
            }
        }
    }
}

#[tokio::test]
async fn contents_are_read_with_a_page_if_all_of_them_fit() {
    let db = Database::channel().await;
    assert!(db.page(ChannelKey::Name("nowhere"), ALL, LARGE).await.is_none());
    let empty = db.page(ChannelKey::Name("room"), ALL, LARGE).await.unwrap();
    assert_eq!((ids(&empty), empty.bytes), ((vec![], vec![]), 0));
    for number in 0..3 {
        db.post_days_ago(0, number, None).await;
    }
    let small = db.page(ChannelKey::Name("room"), ALL, LARGE).await.unwrap();
    assert_eq!((small.messages.len(), small.rest.len()), (3, 0));
    let fitting = db.page(ChannelKey::Name("room"), ALL, small.bytes).await.unwrap();
    assert_eq!((fitting.messages.len(), fitting.rest.len()), (3, 0));
    let large = db.page(ChannelKey::Name("room"), ALL, small.bytes - 1).await.unwrap();
    assert_eq!((large.messages.len(), large.rest.len(), large.bytes), (0, 3, 0));
    assert_eq!(large.rest.iter().map(|(_, bytes)| bytes).sum::<usize>(), small.bytes);
    let without = db.page(ChannelKey::Name("room"), ALL, None).await.unwrap();
    assert_eq!((ids(&without), without.bytes, without.rest), (ids(&large), 0, large.rest));
}

#[tokio::test]
async fn a_page_counts_as_the_read_of_its_messages_does() {
    let db = Database::channel().await;
    let (first, second) = (db.post_days_ago(1, 0, None).await, db.post_days_ago(0, 1, None).await);
    let read = |message| {
        format!(
            "INSERT INTO message_reads (workspace_id, message_id, agent_id, read_at)
             VALUES ({WORKSPACE}, {message}, 1, now())"
        )
    };
    let deliver = format!(
        "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, channel_id, node_id, created_at,
                                 expires_at)
         VALUES ({WORKSPACE}, 1, 1, '{}', {first}, 1, 'n', now(), now() + interval '1 hour')",
        (db.now - Days::new(1)).date_naive()
    );
    let react = format!(
        "INSERT INTO message_reactions (workspace_id, message_id, emoji, agent_id, reaction_id, author_id, created_at)
         VALUES ({WORKSPACE}, {first}, '+1', 1, 5, {SENDER}, now())"
    );
    let mut counted = Vec::new();
    for step in 0..5 {
        match step {
            1 => drop(db.post_days_ago(0, 2, Some(first)).await),
            2 => {
                db.run(&deliver).await;
                db.ack_floor(1, 1).await;
            }
            3 => db.run(&read(second)).await,
            4 => db.run(&react).await,
            _ => {}
        }
        let page = db.page(ChannelKey::Name("room"), ALL, LARGE).await.unwrap();
        let (scope, _) = Database::mailbox(1);
        let by_id = db.store.listed_messages(scope, &ids(&page).0).await.unwrap();
        assert_eq!(format!("{:?}", page.messages), format!("{by_id:?}"), "step {step}");
        counted.extend(page.messages.iter().map(|row| (row.reply_count, row.read_by_count, row.reactions.len())));
    }
    let expected =
        [(0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 1, 0), (0, 1, 0), (1, 1, 1)];
    assert_eq!(counted, expected, "of the second and the first message after each step");
}

#[tokio::test]
async fn a_conversation_is_read_by_its_participants_only() {
    let db = Database::channel().await;
    db.run("UPDATE channels SET type = 1, conversation_id = 'talk' WHERE channel_id = 1").await;
    db.post_days_ago(3, 0, None).await;
    db.post_days_ago(0, 1, None).await;
    let own = db.page(ChannelKey::Conversation("talk", AgentId::new(1)), ALL, LARGE).await.unwrap();
    assert!(own.is_readable);
    assert_eq!((own.messages.len(), own.rest.len()), (1, 1));
    let other = db.page(ChannelKey::Conversation("talk", AgentId::new(SENDER)), ALL, LARGE).await.unwrap();
    assert!(!other.is_readable);
    assert_eq!(ids(&other), (vec![], vec![]));
    assert!(db.page(ChannelKey::Name("room"), ALL, LARGE).await.is_none(), "a conversation has no public name");
    assert!(db.page(ChannelKey::Conversation("talks", AgentId::new(1)), ALL, LARGE).await.is_none());
}
