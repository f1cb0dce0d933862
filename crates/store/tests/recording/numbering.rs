use relay_domain::{
    AgentId, ChannelId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, access::token::TokenHash, nodes::NodeKind,
};
use relay_store::{
    ChannelCreation, EnrolmentToken, JoinOutcome, MemberKey, NewChannel, NodeEnrolment,
    events::{Event, RecordedEvents},
    nodes::fence::Fence,
};
use serde_json::json;
use sqlx::Row as _;

use crate::fixture::{Database, WORKSPACE};

fn scope(workspace: i64) -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
}

fn event(kind: &'static str) -> Event {
    Event::new(kind, json!({}))
}

fn enrolment(name: &str) -> NodeEnrolment {
    NodeEnrolment {
        node_id: None,
        fresh_id: NodeId::new(format!("node_{name}")),
        name: name.to_owned(),
        machine_id: None,
        kind: NodeKind::Ws,
        delivery_adapter: None,
        delivery: None,
        role: None,
        capabilities: None,
        max_agents: None,
        tags: None,
        version: None,
        token: EnrolmentToken::New(TokenHash::from_token(name)),
        quota: None,
    }
}

impl Database {
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

/// Makes one change of one of many writers, of another kind each round. A writer has agents of its own.
async fn change(db: &Database, writer: i64, round: i64) -> RecordedEvents {
    let workspace = WORKSPACE + (writer + round) % 3;
    let scope = scope(workspace);
    let (id, at) = (1000 + writer * 100 + round, db.now);
    match round % 4 {
        0 => {
            let agents = [writer * 10 + 1, writer * 10 + 2];
            db.go_offline(workspace, &agents).await;
            let keys = agents.map(|agent| (scope, AgentId::new(agent)));
            db.store.mark_agents_online(&keys, at).await.unwrap().remove(0)
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
                quota: None,
            };
            let made = db.store.create_channel(scope, &new, event("channel.created")).await.unwrap();
            let ChannelCreation::Created(recorded) = made else { panic!("the name is fresh, and there is room") };
            recorded
        }
        2 => db.store.enrol_node(scope, &enrolment(&format!("n{id}")), at).await.unwrap().1.unwrap(),
        _ => {
            let member = MemberKey { channel: ChannelId::new(1), agent: AgentId::new(writer * 10 + 1) };
            match db.store.join_channel(scope, member, at, event("member.joined")).await.unwrap() {
                JoinOutcome::Joined(recorded) => recorded,
                JoinOutcome::AlreadyMember => {
                    let left = db.store.leave_channel(scope, member, at, event("member.left"));
                    left.await.unwrap().unwrap()
                }
                JoinOutcome::Refused => panic!("the channel is open and the agent lives"),
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
            }
            recorded
        });
    }
    let mut reported: Vec<RecordedEvents> = tasks.join_all().await.into_iter().flatten().collect();
    reported.sort_by_key(|recorded| recorded.first_seq);
    for workspace in WORKSPACE..WORKSPACE + 3 {
        let records = db.numbers(workspace).await;
        let mut next = 1;
        for (first, last) in &records {
            assert_eq!(*first, next, "a gap or an overlap in workspace {workspace}");
            next = last + 1;
        }
        assert_eq!(db.next_seq(workspace).await, next);
        let reported: Vec<(i64, i64)> = reported
            .iter()
            .filter(|recorded| recorded.scope == scope(workspace))
            .map(|recorded| (recorded.first_seq, recorded.first_seq + recorded.events.len() as i64 - 1))
            .collect();
        assert_eq!(reported, records, "the events reported to the callers are those of the log");
    }
    let records = db.number("SELECT count(*) FROM event_log").await;
    assert_eq!(records, WRITERS * ROUNDS, "each change is one record");
}

#[tokio::test]
async fn a_change_without_effect_records_nothing_and_waits_for_no_lock() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    db.run("INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'room', now())").await;
    let member = MemberKey { channel: ChannelId::new(1), agent: ada };
    let join = || db.store.join_channel(scope, member, db.now, event("member.joined"));
    assert!(matches!(join().await.unwrap(), JoinOutcome::Joined(_)));
    assert_eq!(db.next_seq(WORKSPACE).await, 2);

    // A read of the log would now wait for two seconds and fail.
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM event_heads FOR UPDATE").execute(&mut *holder).await.unwrap();
    assert!(matches!(join().await.unwrap(), JoinOutcome::AlreadyMember));
    assert!(db.store.mark_agents_online(&[(scope, ada)], db.now).await.unwrap().is_empty(), "it was active");
    let seen = [relay_store::LastSeen { scope, agent_id: ada, at: db.now + chrono::TimeDelta::seconds(1) }];
    assert!(db.store.record_agents_seen(&seen, db.now).await.unwrap().is_empty());
    let fence = Fence { scope, node_id: NodeId::direct(ada), provider: ProviderName::new("default"), epoch: 5 };
    let ended = db.store.disconnect_provider(&fence, db.now).await;
    assert!(ended.unwrap().is_none(), "it was not connected");
    holder.rollback().await.unwrap();
    assert_eq!(db.next_seq(WORKSPACE).await, 2);
}

#[tokio::test]
async fn a_transaction_that_fails_at_its_commit_leaves_no_gap() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    let ada = [(scope, ada)];
    let online = || db.store.mark_agents_online(&ada, db.now);
    db.go_offline(WORKSPACE, &[1]).await;
    assert_eq!(online().await.unwrap()[0].first_seq, 1);

    db.go_offline(WORKSPACE, &[1]).await;
    db.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'refused at the commit'; END $$;
         CREATE CONSTRAINT TRIGGER refused AFTER UPDATE ON event_heads DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await;
    assert!(online().await.is_err());
    let status: String =
        sqlx::query_scalar("SELECT status FROM agents WHERE agent_id = 1").fetch_one(&db.pool).await.unwrap();
    assert_eq!(status, "offline", "neither the change nor its event");
    assert_eq!(db.next_seq(WORKSPACE).await, 2);

    db.run("DROP TRIGGER refused ON event_heads").await;
    assert_eq!(online().await.unwrap()[0].first_seq, 2, "the number was not used up");
    assert_eq!(db.numbers(WORKSPACE).await, [(1, 1), (2, 2)]);
}
