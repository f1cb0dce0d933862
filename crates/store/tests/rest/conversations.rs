use relay_domain::{
    AgentId, ChannelId, ConversationId, WorkspaceId,
    channels::{ChannelKind, direct_names},
    messages::MessagePage,
    observers::ObserverFilters,
};
use relay_store::{IdempotencyKey, JoinOutcome, MemberKey, NewConversation, OpenOutcome, events::Event};
use serde_json::json;

use crate::fixture::{Database, WORKSPACE};

const PAGE: MessagePage = MessagePage { before: None, after: None, limit: 50 };

async fn message(db: &Database, id: i64, channel: i64, author: i64, thread: Option<i64>) -> i64 {
    let made_ms = db.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS;
    let id = (made_ms << 22) + id;
    sqlx::query(
        "INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, thread_id,
                               text, created_at)
         VALUES ($1, $2, ($3::timestamptz AT TIME ZONE 'UTC')::date, $4, $5, 'x', $6, 'hi', $3)",
    )
    .bind(WORKSPACE)
    .bind(id)
    .bind(db.now)
    .bind(channel)
    .bind(author)
    .bind(thread)
    .execute(&db.pool)
    .await
    .unwrap();
    id
}

#[tokio::test]
async fn two_agents_opening_at_once_get_one_conversation() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    db.agent(2, "bob").await;
    let (scope, _) = Database::mailbox(1);
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..8i64 {
        let store = db.store.clone();
        tasks.spawn(async move {
            let names = direct_names(WorkspaceId::new(WORKSPACE), AgentId::new(1), AgentId::new(2));
            let new = NewConversation {
                channel: ChannelId::new(100 + n),
                channel_name: &names.channel_name,
                channel_kind: ChannelKind::Direct,
                conversation: &names.conversation,
                title: None,
                created_by: AgentId::new(1 + n % 2),
                members: &[AgentId::new(1), AgentId::new(2)],
                key: None,
            };
            match store.open_conversation(scope, &new).await.unwrap() {
                OpenOutcome::Open(row) => row.channel_id,
                OpenOutcome::KeyUsed => panic!("no key was given"),
            }
        });
    }
    let channels: std::collections::HashSet<_> = tasks.join_all().await.into_iter().collect();
    assert_eq!(channels.len(), 1);
}

#[tokio::test]
async fn a_group_is_made_once_under_its_key_and_listed_with_what_is_unread() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    db.agent(2, "bob").await;
    let (scope, ada) = Database::mailbox(1);
    let answer = serde_json::json!({ "id": "50" });
    let conversation = ConversationId::new("50");
    let new = NewConversation {
        channel: ChannelId::new(50),
        channel_name: "group-dm-50",
        channel_kind: ChannelKind::Group,
        conversation: &conversation,
        title: Some("us"),
        created_by: ada,
        members: &[ada, AgentId::new(2)],
        key: Some((IdempotencyKey { hash: [1; 32], fingerprint: [2; 32] }, &answer)),
    };
    assert!(matches!(db.store.open_conversation(scope, &new).await.unwrap(), OpenOutcome::Open(_)));
    assert!(matches!(db.store.open_conversation(scope, &new).await.unwrap(), OpenOutcome::KeyUsed));

    let first = message(&db, 1, 50, 2, None).await;
    message(&db, 2, 50, 1, None).await;
    let last = message(&db, 3, 50, 2, None).await;
    message(&db, 4, 50, 2, Some(first)).await;
    // Ada's node has acknowledged the first one.
    sqlx::query(
        "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, channel_id, node_id, created_at,
                                 expires_at)
         SELECT $1, 1, 1, ($3::timestamptz AT TIME ZONE 'UTC')::date, $2, 50, 'n', $3, $3 + interval '1 hour'",
    )
    .bind(WORKSPACE)
    .bind(first)
    .bind(db.now)
    .execute(&db.pool)
    .await
    .unwrap();
    db.ack_floor(1, 1).await;

    let listed = db.store.conversations(scope, ada, 10).await.unwrap();
    let [(group, text_bytes)] = listed.as_slice() else { panic!("{listed:?}") };
    let texts = db.store.message_texts(scope, &[relay_domain::MessageId::new(last)]).await.unwrap();
    assert_eq!(texts.values().map(String::len).collect::<Vec<_>>(), [*text_bytes]);
    assert_eq!(group.conversation.title.as_deref(), Some("us"));
    assert_eq!(group.participant_names, ["ada", "bob"]);
    assert_eq!(
        (group.last_message.as_ref().map(|last| last.message_id.get()), group.unread_count),
        (Some(last), 1),
        "own and acked ones are read"
    );

    let page = db.store.channel_messages(scope, ChannelId::new(50), PAGE, &ObserverFilters::default()).await.unwrap();
    let ids: Vec<_> = page.iter().map(|(id, _)| *id).collect();
    let page = db.store.listed_messages(scope, &ids).await.unwrap();
    let seen: Vec<_> = page.iter().map(|m| (m.message.id.get() & 0xff, m.reply_count)).collect();
    assert_eq!(seen, [(3, 0), (2, 0), (1, 1)], "roots, newest first");
    let replies =
        db.store.replies(scope, relay_domain::MessageId::new(first), PAGE, &ObserverFilters::default()).await.unwrap();
    assert_eq!(replies.len(), 1);
}

#[tokio::test]
async fn a_leaving_member_raises_the_members_version() {
    let db = Database::fresh().await;
    for (agent, name) in [(1, "ada"), (2, "bob"), (3, "cyd")] {
        db.agent(agent, name).await;
    }
    let (scope, ada) = Database::mailbox(1);
    let conversation = ConversationId::new("60");
    let new = NewConversation {
        channel: ChannelId::new(60),
        channel_name: "group-dm-60",
        channel_kind: ChannelKind::Group,
        conversation: &conversation,
        title: None,
        created_by: ada,
        members: &[ada, AgentId::new(2)],
        key: None,
    };
    let OpenOutcome::Open(made) = db.store.open_conversation(scope, &new).await.unwrap() else { panic!() };
    let channel = ChannelId::new(60);
    let (event, (cyd, bob)) = (|| Event::new("member", json!({})), (AgentId::new(3), AgentId::new(2)));
    let member = |agent| MemberKey { channel, agent };
    let join = || db.store.join_channel(scope, member(cyd), db.now, event());
    assert!(matches!(join().await.unwrap(), JoinOutcome::Joined(_)));
    assert!(matches!(join().await.unwrap(), JoinOutcome::AlreadyMember));
    assert!(db.store.leave_channel(scope, member(bob), db.now, event()).await.unwrap().is_some());
    assert!(db.store.leave_channel(scope, member(bob), db.now, event()).await.unwrap().is_none());
    assert_eq!(db.number("SELECT sum(last_seq - first_seq + 1)::bigint FROM event_log").await, 2);
    let now = db.store.conversation(scope, "60").await.unwrap().unwrap();
    assert_eq!(now.members_version, made.members_version + 2);
    assert_eq!(db.store.participant_count(scope, channel).await.unwrap(), 2);
}
