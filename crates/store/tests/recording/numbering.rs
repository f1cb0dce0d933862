use relay_domain::{
    AgentId, ChannelId, MessageId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, token::TokenHash,
};
use relay_store::{
    ChannelCreation, Joining, MessageChange, NewChannel, NodeEnrolment,
    events::{EventBody, NewEvent, Recorded},
};
use serde_json::json;
use sqlx::Row as _;

use crate::fixture::{Database, WORKSPACE};

fn scope(workspace: i64) -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
}

fn event(kind: &'static str) -> NewEvent {
    NewEvent::new(kind, json!({}))
}

fn enrolment(name: &str) -> NodeEnrolment {
    NodeEnrolment {
        node_id: None,
        fresh_id: NodeId::new(format!("node_{name}")),
        name: name.to_owned(),
        machine_id: None,
        kind: "ws",
        delivery_adapter: None,
        delivery: None,
        role: None,
        capabilities: None,
        max_agents: None,
        tags: None,
        version: None,
        token_hash: TokenHash::of(name),
        ceiling: None,
    }
}

impl Database {
    /// Numbers all events that wait.
    pub(crate) async fn number_all(&self) {
        let scopes = self.store.unnumbered_workspaces(-3600.0, 100).await.unwrap();
        while !scopes.is_empty() && self.store.number_events(&scopes).await.unwrap().more {}
    }

    /// The numbers of the log of a workspace, record by record.
    async fn numbers(&self, workspace: i64) -> Vec<(i64, i64)> {
        sqlx::query("SELECT first_seq, last_seq FROM event_log WHERE workspace_id = $1 ORDER BY last_seq")
            .bind(workspace)
            .fetch_all(&self.pool)
            .await
            .unwrap()
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect()
    }

    async fn next_seq(&self, workspace: i64) -> i64 {
        let query = format!("SELECT coalesce(max(next_seq), 1) FROM event_heads WHERE workspace_id = {workspace}");
        self.number(&query).await
    }

    async fn go_offline(&self, workspace: i64, agents: &[i64]) {
        sqlx::query("UPDATE agents SET status = 'offline' WHERE workspace_id = $1 AND agent_id = ANY ($2)")
            .bind(workspace)
            .bind(agents)
            .execute(&self.pool)
            .await
            .unwrap();
    }
}

/// What one of many writers does in its round: another kind of change each time. Its agents are its own.
async fn change(db: &Database, writer: i64, round: i64) -> Recorded {
    let workspace = WORKSPACE + (writer + round) % 3;
    let scope = scope(workspace);
    let (id, at) = (1000 + writer * 100 + round, db.now);
    match round % 4 {
        0 => {
            let agents = [writer * 10 + 1, writer * 10 + 2];
            db.go_offline(workspace, &agents).await;
            db.store.agents_online(scope, &agents.map(AgentId::new), at).await.unwrap()
        }
        1 => {
            let (name, metadata) = (format!("c{id}"), json!({}));
            let new = NewChannel {
                channel_id: ChannelId::new(id),
                name: &name,
                topic: None,
                metadata: &metadata,
                created_by: None,
                at,
                ceiling: None,
            };
            let made = db.store.create_channel(scope, &new, event("channel.created")).await.unwrap();
            let ChannelCreation::Made(recorded) = made else { panic!("the name is fresh, and there is room") };
            recorded
        }
        2 => db.store.enrol_node(scope, &enrolment(&format!("n{id}")), at).await.unwrap().1.unwrap(),
        _ => {
            let (agent, channel) = (AgentId::new(writer * 10 + 1), ChannelId::new(1));
            match db.store.join_channel(scope, channel, agent, at, event("member.joined")).await.unwrap() {
                Joining::Joined(recorded) => recorded,
                Joining::AlreadyMember => {
                    let left = db.store.leave_channel(scope, channel, agent, at, event("member.left"));
                    left.await.unwrap().unwrap()
                }
                Joining::Refused => panic!("the channel is open and the agent lives"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_writers_of_three_workspaces_leave_no_gap() {
    const WRITERS: i64 = 16;
    const ROUNDS: i64 = 12;
    let db = std::sync::Arc::new(Database::fresh().await);
    for workspace in WORKSPACE..WORKSPACE + 3 {
        for agent in (0..WRITERS).flat_map(|writer| [writer * 10 + 1, writer * 10 + 2]) {
            db.run(&format!(
                "INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
                 VALUES ({workspace}, {agent}, 'a{agent}', 'node_direct_{agent}', now(), now())"
            ))
            .await;
        }
        db.run(&format!(
            "INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES ({workspace}, 1, 'room', now())"
        ))
        .await;
    }
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let db = std::sync::Arc::clone(&db);
        tasks.spawn(async move {
            let mut recorded = Vec::new();
            for round in 0..ROUNDS {
                recorded.push(change(&db, writer, round).await);
                if writer < 4 {
                    db.number_all().await;
                }
            }
            recorded
        });
    }
    let recorded: Vec<Recorded> = tasks.join_all().await.into_iter().flatten().collect();
    db.number_all().await;
    for workspace in WORKSPACE..WORKSPACE + 3 {
        let mut next = 1;
        for (first, last) in db.numbers(workspace).await {
            assert_eq!(first, next, "a gap or an overlap in workspace {workspace}");
            next = last + 1;
        }
        assert_eq!(db.next_seq(workspace).await, next);
        let events = recorded.iter().filter(|recorded| recorded.scope == scope(workspace));
        assert_eq!(events.map(|recorded| recorded.events.len() as i64).sum::<i64>(), next - 1);
    }
    let records = db.number("SELECT count(*) FROM event_log").await;
    assert_eq!(records, WRITERS * ROUNDS, "each change is one record");
    assert_eq!(db.number("SELECT count(*) FROM event_inbox").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn numbers_follow_the_order_of_cause() {
    const WRITERS: i64 = 6;
    const ROUNDS: i64 = 25;
    let db = std::sync::Arc::new(Database::fresh().await);
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let db = std::sync::Arc::clone(&db);
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let (name, metadata) = (format!("c{writer}-{round}"), json!({}));
                let new = NewChannel {
                    channel_id: ChannelId::new(writer * 100 + round),
                    name: &name,
                    topic: None,
                    metadata: &metadata,
                    created_by: None,
                    at: db.now,
                    ceiling: None,
                };
                let event = NewEvent::new("channel.created", json!({ "writer": writer, "round": round }));
                db.store.create_channel(scope(WORKSPACE), &new, event).await.unwrap();
                if writer % 2 == 0 {
                    db.number_all().await;
                }
            }
        });
    }
    tasks.join_all().await;
    db.number_all().await;
    let told: Vec<(i64, i64)> = sqlx::query_as(
        "SELECT (e -> 'd' ->> 'writer')::bigint, (e -> 'd' ->> 'round')::bigint
           FROM event_log l, json_array_elements(l.events) AS e ORDER BY l.last_seq",
    )
    .fetch_all(&db.pool)
    .await
    .unwrap();
    for writer in 0..WRITERS {
        let rounds: Vec<i64> = told.iter().filter(|(by, _)| *by == writer).map(|(_, round)| *round).collect();
        assert_eq!(rounds, (0..ROUNDS).collect::<Vec<_>>(), "what a writer did later has a larger number");
    }
}

#[tokio::test]
async fn an_edit_is_known_by_the_number_of_its_event_once_it_has_one() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    db.deliveries(1, &[60]).await;
    db.run("INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'room', now())").await;
    db.run("UPDATE messages SET channel_id = 1, agent_id = 1").await;
    let message = MessageId::new(db.number("SELECT message_id FROM messages").await);
    let event = |kind: &'static str| NewEvent { body: EventBody::Message(message), ..NewEvent::new(kind, json!({})) };
    let change = |text: &'static str| MessageChange { text: Some((text, &[])), ..Default::default() };
    let said = async |seq: i64| {
        let told = db.store.messages_of_events(scope, &[(seq, message.get())]).await.unwrap();
        told[&seq].text.clone()
    };
    let first = said(1).await;
    for text in ["second", "third"] {
        let edit = db.store.update_message(scope, (message, ada), change(text), db.now, event("message.updated"));
        edit.await.unwrap().unwrap();
    }
    assert_eq!(said(1).await, first, "an event told before edits that have no number yet");
    let batch = db.store.number_events(&[scope]).await.unwrap();
    assert_eq!(batch.records.iter().map(|one| one.record.first_seq).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((said(0).await, said(1).await, said(2).await), (first, "second".to_owned(), "third".to_owned()));
}

#[tokio::test]
async fn what_changes_nothing_records_nothing() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    db.run("INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'room', now())").await;
    let join = || db.store.join_channel(scope, ChannelId::new(1), ada, db.now, event("member.joined"));
    assert!(matches!(join().await.unwrap(), Joining::Joined(_)));
    db.number_all().await;
    assert_eq!(db.next_seq(WORKSPACE).await, 2);

    assert!(matches!(join().await.unwrap(), Joining::AlreadyMember));
    assert!(db.store.agents_online(scope, &[ada], db.now).await.unwrap().events.is_empty(), "it was active");
    let seen = [relay_store::Seen { scope, agent_id: ada, at: db.now + chrono::TimeDelta::seconds(1) }];
    assert!(db.store.agents_seen(&seen, db.now).await.unwrap().is_empty());
    let provider = ProviderName::new("default");
    let ended = db.store.disconnect_provider(scope, &NodeId::direct(ada), &provider, 5, db.now).await;
    assert!(ended.unwrap().is_none(), "it was not connected");
    assert_eq!(db.number("SELECT count(*) FROM event_inbox").await, 0);
}

#[tokio::test]
async fn who_records_waits_for_nobody() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    db.go_offline(WORKSPACE, &[1]).await;
    db.run("INSERT INTO event_heads (workspace_id) VALUES (7) ON CONFLICT DO NOTHING").await;
    // Whoever asked for a number now would wait for two seconds and fail.
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM event_heads FOR UPDATE").execute(&mut *holder).await.unwrap();
    assert_eq!(db.store.agents_online(scope, &[ada], db.now).await.unwrap().events.len(), 1);
    assert!(db.store.number_events(&[scope]).await.is_err());
    holder.rollback().await.unwrap();
    db.number_all().await;
    assert_eq!(db.numbers(WORKSPACE).await, [(1, 1)]);
}

#[tokio::test]
async fn numbering_that_fails_at_its_commit_leaves_no_gap() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    let ada = [ada];
    let online = || db.store.agents_online(scope, &ada, db.now);
    db.go_offline(WORKSPACE, &[1]).await;
    online().await.unwrap();
    db.number_all().await;

    db.go_offline(WORKSPACE, &[1]).await;
    online().await.unwrap();
    db.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'refused at the commit'; END $$;
         CREATE CONSTRAINT TRIGGER refused AFTER UPDATE ON event_heads DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await;
    assert!(db.store.number_events(&[scope]).await.is_err());
    assert_eq!(db.next_seq(WORKSPACE).await, 2);
    assert_eq!(db.numbers(WORKSPACE).await, [(1, 1)]);

    db.run("DROP TRIGGER refused ON event_heads").await;
    db.number_all().await;
    assert_eq!(db.numbers(WORKSPACE).await, [(1, 1), (2, 2)], "the number was not used up");
}
