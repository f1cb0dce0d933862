use std::time::Duration;

use relay_domain::{
    AgentId, BatchId, ChannelId, GatewayId, MessageId, WorkspaceId, WorkspaceScope,
    agents::AgentKind,
    channels::ChannelKind,
    mailboxes::delivery::{Mode, Reason},
    messages::Message,
};
use relay_store::messages::batch::{Batch, NewRecipient, NewSend, SendOutcome};
use serde_json::{Map, Value};

use crate::fixture::{Database, SENDER, WORKSPACE};

/// A statement that compared each recipient with each other would take 12 s and more for so many, this one 0.5 s.
const RECIPIENTS: i64 = 10_000;
const STATEMENT_LIMIT: Duration = Duration::from_secs(4);

fn send_to_all(db: &Database) -> NewSend {
    let recipient = |id| NewRecipient { agent_id: AgentId::new(id), mode: Mode::Wait, reason: Reason::Message };
    NewSend {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(WORKSPACE)),
        message: Message {
            id: MessageId::new(5),
            channel_id: ChannelId::new(1),
            channel_name: "room".to_owned(),
            channel_kind: ChannelKind::Channel,
            conversation_id: None,
            agent_id: AgentId::new(SENDER),
            agent_name: "sender".to_owned(),
            agent_kind: AgentKind::Agent,
            thread_id: None,
            text: "text".to_owned(),
            blocks: None,
            metadata: Value::Object(Map::new()).into(),
            attachments: Value::Array(Vec::new()),
            mentions: Vec::new(),
            mode: Mode::Wait,
            content_type: None,
            created_at: db.now,
        },
        // Not in the order in which their heads are locked.
        recipients: (0..RECIPIENTS).map(|nth| recipient(1000 + (nth * 7) % RECIPIENTS)).collect(),
        members_version: 0,
        token_generation: None,
        hidden_sender: false,
        key: None,
        ttl_ms: None,
        traceparent: None,
        events: Vec::new(),
        sequence: None,
    }
}

#[tokio::test]
async fn the_cost_of_a_post_grows_with_its_recipients_and_not_with_their_square() {
    let db = Database::fresh().await;
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now());
         INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES ({WORKSPACE}, 1, 'room', now());
         INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
         SELECT {WORKSPACE}, 1000 + n, 'a' || n, 'node_direct_' || n, now(), now()
           FROM generate_series(0, {RECIPIENTS} - 1) n;
         INSERT INTO mailbox_heads SELECT workspace_id, agent_id, 1 FROM agents WHERE agent_id >= 1000;
         INSERT INTO mailbox_cursors SELECT workspace_id, agent_id, 0, 0, 0 FROM agents WHERE agent_id >= 1000"
    ))
    .await;
    let version: i64 = db.number("SELECT members_version FROM channels WHERE channel_id = 1").await;
    let store = db.store.with_statement_limit(STATEMENT_LIMIT);
    for nth in 1..=2 {
        let mut send = send_to_all(&db);
        send.message.id = MessageId::new(5 + nth);
        send.members_version = version;
        let batch = Batch {
            id: BatchId::new(10 + nth),
            gateway_id: GatewayId::new(1),
            epoch: None,
            traceparent: None,
            sends: vec![send],
        };
        let outcome = store.commit_batch(&batch).await.unwrap();
        let [SendOutcome::Committed(rows)] = &outcome.sends[..] else { panic!("{:?}", outcome.sends) };
        assert_eq!(rows.len(), 10_000);
        // Each mailbox has its own numbers.
        assert!(rows.iter().flatten().all(|row| row.seq == nth), "{:?}", rows.iter().flatten().next());
        assert_eq!(rows.iter().flatten().count(), rows.len());
    }
}
