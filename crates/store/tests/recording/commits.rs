use std::time::Duration;

use relay_domain::{
    AgentId, BatchId, ChannelId, GatewayId, MessageId, WorkspaceId, WorkspaceScope,
    agents::AgentKind,
    channels::ChannelKind,
    mailboxes::delivery::{Mode, Reason},
    messages::Message,
};
use relay_store::{
    Store,
    messages::batch::{Batch, NewRecipient, NewSend, SendOutcome},
};
use serde_json::{Map, Value};

use crate::fixture::{Database, SENDER, WORKSPACE};

/// A statement that compared each recipient with each other would take 12 s and more for so many, this one 0.5 s.
const RECIPIENTS: i64 = 10_000;
const STATEMENT_LIMIT: Duration = Duration::from_secs(4);

/// Send of message `id` to the members of the room.
pub(crate) fn send_to(db: &Database, id: i64, recipients: impl Iterator<Item = i64>) -> NewSend {
    let recipient = |id| NewRecipient { agent_id: AgentId::new(id), mode: Mode::Wait, reason: Reason::Message };
    NewSend {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(WORKSPACE)),
        message: Message {
            id: MessageId::new(id),
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
        recipients: recipients.map(recipient).collect(),
        members_version: 0,
        token_generation: None,
        hidden_sender: false,
        key: None,
        ttl_ms: None,
        traceparent: None,
        events: Vec::new(),
        arrived: MessageId::new(id),
        sequence: None,
    }
}

/// Creates a room and `members` agents, with ids from 1000 on.
pub(crate) async fn create_room(db: &Database, members: i64) {
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now());
         INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES ({WORKSPACE}, 1, 'room', now());
         UPDATE channels SET members_version = 0;
         INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
         SELECT {WORKSPACE}, 1000 + n, 'a' || n, 'node_direct_' || n, now(), now()
           FROM generate_series(0, {members} - 1) n;
         INSERT INTO mailbox_heads SELECT workspace_id, agent_id, 1 FROM agents WHERE agent_id >= 1000;
         INSERT INTO mailbox_cursors SELECT workspace_id, agent_id, 0, 0, 0 FROM agents WHERE agent_id >= 1000"
    ))
    .await;
}

pub(crate) fn batch(id: i64, sends: Vec<NewSend>) -> Batch {
    Batch { id: BatchId::new(id), gateway_id: GatewayId::new(1), epoch: None, traceparent: None, sends }
}

#[tokio::test]
async fn the_cost_of_a_batch_grows_with_its_recipients_and_not_with_their_square() {
    let db = Database::fresh().await;
    create_room(&db, RECIPIENTS).await;
    let store = db.store.with_statement_limit(STATEMENT_LIMIT);
    for nth in 1..=2 {
        // Not in the order in which their heads are locked. Each message has fewer recipients than a fan-out.
        let members: Vec<i64> = (0..RECIPIENTS).map(|nth| 1000 + (nth * 7) % RECIPIENTS).collect();
        let messages = members.chunks(1000).zip(100 * nth..);
        let sends = messages.map(|(members, id)| send_to(&db, id, members.iter().copied())).collect();
        let outcome = store.commit_batch(&batch(10 + nth, sends)).await.unwrap();
        let mut rows = 0;
        for send in &outcome.sends {
            let SendOutcome::Committed(written) = send else { panic!("{send:?}") };
            // Each mailbox has its own numbers.
            assert!(written.iter().all(|row| row.as_ref().is_some_and(|row| row.seq == nth)), "{:?}", written.first());
            rows += written.len() as i64;
        }
        assert_eq!(rows, RECIPIENTS);
    }
}

/// Postgres plans a statement once for each connection, and the one that commits a batch is large.
#[tokio::test]
async fn commits_keep_their_connection_beside_bursts_of_other_statements() {
    const CONNECTIONS: u32 = 16;
    const COMMITS: i64 = 20;
    let db = Database::fresh().await;
    create_room(&db, 1).await;
    db.run(
        "CREATE TABLE committers (pid int);
         CREATE FUNCTION note_committer() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN INSERT INTO committers VALUES (pg_backend_pid()); RETURN NULL; END $$;
         CREATE TRIGGER note_committer AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION note_committer()",
    )
    .await;
    let store = Store::connect(&db.url, CONNECTIONS).unwrap().with_statement_limit(STATEMENT_LIMIT);
    for nth in 1..=COMMITS {
        let send = send_to(&db, 100 + nth, std::iter::once(1000));
        store.commit_batch(&batch(nth, vec![send])).await.unwrap();
        // Half of them wait for a connection.
        let others = (0..2 * CONNECTIONS).map(|_| store.feed_position());
        for other in futures::future::join_all(others).await {
            other.unwrap();
        }
    }
    assert_eq!(db.number("SELECT count(*) FROM committers").await, COMMITS);
    assert_eq!(db.number("SELECT count(DISTINCT pid) FROM committers").await, 1);
}
