use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceScope};
use relay_store::{
    events::EventBody,
    nodes::{
        direct::DirectClaim,
        fence::Fence,
        providers::{ProviderClaim, ProviderRegistration, RegisterOutcome},
    },
};
use serde_json::json;

use crate::fixture::{Database, WORKSPACE};

fn registration(provider: &ProviderName) -> ProviderRegistration {
    ProviderRegistration {
        node_name: "box".into(),
        provider: provider.clone(),
        instance_id: "i".into(),
        capabilities: json!([]),
        cursor_granted: false,
        tags: Vec::new(),
        version: String::new(),
        machine_id: None,
        max_agents: 0,
    }
}

fn fence(scope: WorkspaceScope, node: &NodeId, provider: &ProviderName, epoch: i64) -> Fence {
    Fence { scope, node_id: node.clone(), provider: provider.clone(), epoch }
}

fn claim(expected_epoch: Option<i64>, requested_at: DateTime<Utc>) -> ProviderClaim<'static> {
    ProviderClaim { expected_epoch, gateway: GatewayId::new(1), action_ids: &[], requested_at }
}

const fn direct_claim<'a>(
    scope: WorkspaceScope,
    node: &'a NodeId,
    registration: &'a ProviderRegistration,
    requested_at: DateTime<Utc>,
) -> DirectClaim<'a> {
    DirectClaim { scope, node, gateway: GatewayId::new(1), requested_at, registration }
}

impl Database {
    async fn node(&self, node: &str, role: &str) {
        self.run(&format!(
            "INSERT INTO nodes (workspace_id, node_id, name, role, created_at)
             VALUES ({WORKSPACE}, '{node}', 'box', '{role}', now())"
        ))
        .await;
    }

    /// Connects a provider, also over another connection; returns its epoch and the kinds of the recorded events.
    async fn connect(&self, scope: WorkspaceScope, node: &NodeId, provider: &ProviderName) -> (i64, Vec<String>) {
        loop {
            let holder = self.store.provider_holder(scope, node, provider).await.unwrap();
            let epoch = holder.map(|holder| holder.epoch);
            let registration = registration(provider);
            let claim = claim(epoch, self.now);
            let registered = if node.as_str().starts_with("node_direct") {
                self.store.register_direct(direct_claim(scope, node, &registration, self.now), self.now).await
            } else {
                self.store.register_provider(scope, node, claim, &registration, self.now).await
            };
            match registered.unwrap() {
                RegisterOutcome::Registered { epoch, recorded } => {
                    return (epoch, recorded.events.iter().map(|event| event.kind.to_string()).collect());
                }
                RegisterOutcome::Raced => {}
                other @ (RegisterOutcome::NameConflict
                | RegisterOutcome::ActionConflict(_)
                | RegisterOutcome::Superseded
                | RegisterOutcome::NoNode
                | RegisterOutcome::TooManyProviders) => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_node_is_online_from_its_first_provider_to_its_last() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    db.node("n1", "broker").await;
    db.run("UPDATE agents SET node_id = 'n1', provider = 'a' WHERE agent_id = 1").await;
    let (scope, _) = Database::mailbox(1);
    let node = NodeId::new("n1");
    let (a, b) = (ProviderName::new("a"), ProviderName::new("b"));
    let (_, reported) = db.connect(scope, &node, &a).await;
    assert_eq!(reported, ["node.status.online"]);
    let (second, reported) = db.connect(scope, &node, &a).await;
    assert!(reported.is_empty(), "a take-over is no change: {reported:?}");
    let (other, reported) = db.connect(scope, &node, &b).await;
    assert!(reported.is_empty(), "{reported:?}");

    let stale = db.store.disconnect_provider(&fence(scope, &node, &a, second - 1), db.now).await.unwrap();
    assert!(stale.is_none(), "superseded");
    let reported = db.store.disconnect_provider(&fence(scope, &node, &a, second), db.now).await.unwrap().unwrap();
    let kinds: Vec<_> = reported.events.iter().map(|event| &*event.kind).collect();
    assert_eq!(kinds, ["agent.status.offline"], "the node is still there");
    let reported = db.store.deregister_provider(&fence(scope, &node, &b, other), db.now).await.unwrap().unwrap();
    assert_eq!(reported.events.len(), 1);
    let data = json!({ "node_id": "n1", "node_name": "box", "reason": "deregistered" });
    assert_eq!((&*reported.events[0].kind, &reported.events[0].body), ("node.status.offline", &EventBody::Data(data)));
    assert_eq!(db.number("SELECT count(*) FROM providers").await, 1);

    let (_, reported) = db.connect(scope, &node, &a).await;
    assert_eq!(reported, ["node.status.online"]);
    let (held, reported) = db.store.remove_provider(scope, &node, &a, db.now).await.unwrap();
    assert!(held.is_some());
    let kinds: Vec<_> = reported.events.iter().map(|event| &*event.kind).collect();
    assert_eq!(kinds, ["node.status.offline"], "its agent was offline before");
}

#[tokio::test]
async fn a_registration_that_waited_for_postgres_does_not_displace_a_later_one() {
    let db = Database::fresh().await;
    let (scope, ada) = Database::mailbox(1);
    db.agent(1, "ada").await;
    let (node, provider) = (NodeId::direct(ada), ProviderName::new("default"));
    db.node(node.as_str(), "direct").await;
    let (epoch, _) = db.connect(scope, &node, &provider).await;
    let registration = registration(&provider);
    let register = async |waited: TimeDelta| {
        db.store.register_direct(direct_claim(scope, &node, &registration, db.now - waited), db.now).await.unwrap()
    };
    let late = register(TimeDelta::seconds(5)).await;
    assert!(matches!(late, RegisterOutcome::Superseded), "{late:?}");
    let concurrent = register(TimeDelta::milliseconds(500)).await;
    let RegisterOutcome::Registered { epoch: newer, .. } = concurrent else { panic!("clocks differ: {concurrent:?}") };
    assert!(newer > epoch);
    db.store.disconnect_provider(&fence(scope, &node, &provider, newer), db.now).await.unwrap();
    let free = register(TimeDelta::seconds(5)).await;
    assert!(matches!(free, RegisterOutcome::Registered { .. }), "the holder has left: {free:?}");
}

/// A failover to a standby without the second registration, whose connection ends after the third one.
#[tokio::test]
async fn the_epoch_of_a_lost_registration_is_given_to_no_other() {
    let ((scope, ada), provider) = (Database::mailbox(1), ProviderName::new("default"));
    for (node, role) in [(NodeId::direct(ada), "direct"), (NodeId::new("n1"), "broker")] {
        let db = Database::fresh().await;
        db.agent(1, "ada").await;
        db.node(node.as_str(), role).await;
        let (replicated, _) = db.connect(scope, &node, &provider).await;
        let (lost, _) = db.connect(scope, &node, &provider).await;
        db.run(&format!("UPDATE providers SET epoch = {replicated} WHERE node_id = '{node}'; SELECT pg_sleep(0.01)"))
            .await;
        let (third, _) = db.connect(scope, &node, &provider).await;
        assert!(third > lost, "{node}: {replicated}, {lost}, {third}");
        let ended = db.store.disconnect_provider(&fence(scope, &node, &provider, lost), db.now).await.unwrap();
        assert!(ended.is_none(), "{node}: {ended:?}");
    }
}

#[tokio::test]
async fn a_direct_node_shows_as_its_agent_only() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    let node = NodeId::direct(ada);
    db.node(node.as_str(), "direct").await;
    let provider = ProviderName::new("default");
    let (epoch, reported) = db.connect(scope, &node, &provider).await;
    assert!(reported.is_empty(), "{reported:?}");
    let reported = db.store.disconnect_provider(&fence(scope, &node, &provider, epoch), db.now).await.unwrap().unwrap();
    let kinds: Vec<_> = reported.events.iter().map(|event| &*event.kind).collect();
    assert_eq!(kinds, ["agent.status.offline"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn providers_that_come_and_go_at_once_record_each_change_of_their_node_once() {
    let db = std::sync::Arc::new(Database::fresh().await);
    db.node("n1", "broker").await;
    let (scope, _) = Database::mailbox(1);
    let mut tasks = tokio::task::JoinSet::new();
    for name in ["a", "b", "c", "d"] {
        let db = std::sync::Arc::clone(&db);
        tasks.spawn(async move {
            let (node, provider) = (NodeId::new("n1"), ProviderName::new(name));
            for _ in 0..20 {
                let (epoch, _) = db.connect(scope, &node, &provider).await;
                let ended = db.store.disconnect_provider(&fence(scope, &node, &provider, epoch), db.now).await.unwrap();
                assert!(ended.is_some(), "nobody else ends it");
            }
        });
    }
    tasks.join_all().await;
    let kinds: Vec<String> =
        sqlx::query_scalar("SELECT e ->> 't' FROM event_log l, json_array_elements(l.events) AS e ORDER BY l.last_seq")
            .fetch_all(&db.pool)
            .await
            .unwrap();
    assert!(kinds.len() >= 2 && kinds.len().is_multiple_of(2), "it ends offline: {kinds:?}");
    for pair in kinds.chunks(2) {
        assert_eq!(pair, ["node.status.online", "node.status.offline"], "one after the other: {kinds:?}");
    }
}
