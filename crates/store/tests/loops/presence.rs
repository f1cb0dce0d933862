use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{AgentId, NodeId, ProviderName, agents::AgentStatus};
use relay_store::{LastSeen, events::RecordedEvents, nodes::fence::Fence};

use crate::fixture::Database;

const TTL: Duration = Duration::from_secs(300);

async fn statuses(db: &Database) -> Vec<(i64, String)> {
    sqlx::query_as("SELECT agent_id, status FROM agents ORDER BY agent_id").fetch_all(&db.pool).await.unwrap()
}

fn reported(recorded: &[RecordedEvents]) -> Vec<(&str, i64)> {
    let events = recorded.iter().flat_map(|recorded| &recorded.events);
    events.map(|event| (&*event.kind, event.agent_id.map_or(0, |id| id.get()))).collect()
}

#[tokio::test]
async fn silent_agents_go_offline_once_and_come_back_with_their_next_call() {
    let db = Database::fresh().await;
    for agent in 1..=5 {
        db.agent(agent, &format!("agent-{agent}")).await;
    }
    db.run(
        "UPDATE agents SET last_seen_at = now() - interval '6 minutes' WHERE agent_id IN (1, 2, 4);
         UPDATE agents SET status = 'offline' WHERE agent_id = 2;
         UPDATE agents SET status = 'blocked' WHERE agent_id = 4;
         UPDATE agents SET last_seen_at = now() - interval '4 minutes' WHERE agent_id = 5",
    )
    .await;
    // In steps: a pass over all that are not offline, which goes on where it stopped.
    let first = db.store.mark_silent_agents(TTL, 2, db.now).await.unwrap();
    assert_eq!((first.agents, first.more), (1, true));
    assert_eq!(reported(&first.recorded), [("agent.status.offline", 1)]);
    let second = db.store.mark_silent_agents(TTL, 2, db.now).await.unwrap();
    assert_eq!((reported(&second.recorded), second.more), (vec![("agent.status.offline", 4)], true));
    let third = db.store.mark_silent_agents(TTL, 2, db.now).await.unwrap();
    assert_eq!((third.agents, third.more), (0, false), "the pass is over");
    let again = db.store.mark_silent_agents(TTL, 100, db.now).await.unwrap();
    assert_eq!((again.agents, again.recorded.len()), (0, 0), "recorded once");
    let offline: Vec<i64> =
        statuses(&db).await.into_iter().filter(|(_, status)| status == "offline").map(|(id, _)| id).collect();
    assert_eq!(offline, [1, 2, 4]);

    let at = db.now + TimeDelta::seconds(1);
    let seen = |agent: i64| {
        let (scope, agent_id) = Database::mailbox(agent);
        LastSeen { scope, agent_id, at }
    };
    let back = db.store.record_agents_seen(&[seen(1), seen(3), seen(1), seen(2)], at).await.unwrap();
    assert_eq!(reported(&back), [("agent.status.active", 1), ("agent.status.active", 2)], "only who was offline");
    assert!(db.store.record_agents_seen(&[seen(1), seen(2)], at).await.unwrap().is_empty());
    // Events and rows agree: the log has each recorded change.
    assert_eq!(db.number("SELECT next_seq FROM event_heads WHERE workspace_id = 7").await, 5);
}

#[tokio::test]
async fn a_status_that_stays_makes_no_event() {
    let db = Database::fresh().await;
    db.agent(1, "agent-1").await;
    let (scope, agent) = Database::mailbox(1);
    let set = |status| db.store.set_agent_status(scope, agent, status, None, db.now);
    assert!(set(AgentStatus::Active).await.unwrap().is_none());
    let recorded = set(AgentStatus::Idle).await.unwrap().unwrap();
    assert_eq!(reported(&[recorded]), [("agent.status.idle", 1)]);
    assert!(set(AgentStatus::Idle).await.unwrap().is_none());
    // A sign of life ends an absence and nothing else.
    let alive = || db.store.set_agent_status(scope, agent, AgentStatus::Active, Some(AgentStatus::Offline), db.now);
    assert!(alive().await.unwrap().is_none());
    assert_eq!(statuses(&db).await[0], (1, "idle".to_owned()));
    assert!(set(AgentStatus::Offline).await.unwrap().is_some());
    assert_eq!(reported(&[alive().await.unwrap().unwrap()]), [("agent.status.active", 1)]);
    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 1").await;
    assert!(set(AgentStatus::Blocked).await.unwrap().is_none(), "deleted");
}

/// Notes of calls are written a little later: one from before must not undo what a node has said since.
#[tokio::test]
async fn calls_of_an_agent_before_its_node_ended_it_do_not_bring_it_back() {
    let db = Database::fresh().await;
    let (before, ended, after) =
        (db.now + TimeDelta::seconds(10), db.now + TimeDelta::seconds(20), db.now + TimeDelta::seconds(30));
    for (agent, node) in [(1, "n1"), (2, "n1"), (3, "n3"), (4, "n4"), (5, "n5")] {
        db.agent(agent, &format!("agent-{agent}")).await;
        db.locate(agent, node, Some("a")).await;
    }
    for (node, silent_seconds) in [("n1", 0), ("n3", 0), ("n4", 50), ("n5", 0)] {
        db.provider(node, "a", 5, silent_seconds).await;
    }
    let (scope, first) = Database::mailbox(1);
    let provider = ProviderName::new("a");
    let fence = Fence { scope, node_id: NodeId::new("n1"), provider: provider.clone(), epoch: 3 };
    db.store.unbind_hosted_agent(&fence, first, ended).await.unwrap().unwrap();
    db.store.sync_inventory(&fence, &[], ended).await.unwrap();
    db.store.disconnect_provider(&Fence { node_id: NodeId::new("n3"), ..fence }, ended).await.unwrap().unwrap();
    db.store.disconnect_silent_providers(Duration::from_secs(45), 100, ended).await.unwrap();
    db.store.remove_provider(scope, &NodeId::new("n5"), &provider, ended).await.unwrap();
    let offline = async || statuses(&db).await.into_iter().filter(|(_, status)| status == "offline").count();
    assert_eq!(offline().await, 5);
    let seen = |at| (1..=5).map(|agent| LastSeen { scope, agent_id: AgentId::new(agent), at }).collect::<Vec<_>>();
    assert!(db.store.record_agents_seen(&seen(before), after).await.unwrap().is_empty());
    assert_eq!(offline().await, 5);
    assert_eq!(reported(&db.store.record_agents_seen(&seen(after), after).await.unwrap()).len(), 5, "a later one does");
}

#[tokio::test]
async fn a_hosted_agent_lives_as_long_as_its_provider_sends_heartbeats() {
    let db = Database::fresh().await;
    for agent in 1..=4 {
        db.agent(agent, &format!("agent-{agent}")).await;
    }
    // Agent 2 is on another provider, 3 on any of the node, and 4 on none.
    db.run(
        "INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, registered_at,
                                last_heartbeat_at)
         VALUES (7, 'n', 'alive', 'i', 1, 5, now(), now()),
                (7, 'n', 'silent', 'i', 1, 5, now(), now() - interval '6 minutes'),
                (7, 'n', 'gone', 'i', 1, NULL, now(), now());
         UPDATE agents SET last_seen_at = now() - interval '6 minutes';
         UPDATE agents SET node_id = 'n', provider = 'alive' WHERE agent_id = 1;
         UPDATE agents SET node_id = 'n', provider = 'silent' WHERE agent_id = 2;
         UPDATE agents SET node_id = 'n' WHERE agent_id = 3;
         UPDATE agents SET status = 'offline' WHERE agent_id = 99",
    )
    .await;
    let live_since = db.now - TimeDelta::minutes(5);
    let scope = Database::mailbox(1).0;
    assert_eq!(db.store.workspace_counts(scope, live_since).await.unwrap().online, 2);
    let marked = db.store.mark_silent_agents(TTL, 100, db.now).await.unwrap();
    assert_eq!(reported(&marked.recorded), [("agent.status.offline", 2), ("agent.status.offline", 4)]);
    let seen = |agent: i64| {
        let (scope, agent) = Database::mailbox(agent);
        let store = &db.store;
        async move { store.agent(scope, agent).await.unwrap().unwrap().last_seen_at }
    };
    assert!(seen(1).await >= db.now && seen(3).await >= db.now, "the heartbeat counts");
    assert!(seen(2).await < live_since && seen(4).await < live_since);

    // The provider is lost: its agents are silent.
    db.run("UPDATE providers SET gateway_id = NULL WHERE provider = 'alive'").await;
    assert!(seen(1).await < live_since);
    let marked = db.store.mark_silent_agents(TTL, 100, db.now).await.unwrap();
    assert_eq!(reported(&marked.recorded), [("agent.status.offline", 1), ("agent.status.offline", 3)]);
}
