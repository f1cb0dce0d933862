use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{GatewayId, NodeId, ProviderName, access::token::TokenHash};
use relay_store::nodes::{
    direct::DirectClaim,
    fence::Fence,
    providers::{ProviderRegistration, RegisterOutcome},
};

use crate::fixture::{Database, WORKSPACE};

const TTL: Duration = Duration::from_secs(45);

impl Database {
    pub(crate) async fn provider(&self, node: &str, provider: &str, gateway: i64, silent_seconds: i64) {
        self.run(&format!(
            "INSERT INTO nodes (workspace_id, node_id, name, created_at)
             VALUES ({WORKSPACE}, '{node}', 'box {node}', now()) ON CONFLICT DO NOTHING;
             INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, handlers_live,
                                    registered_at, last_heartbeat_at)
             VALUES ({WORKSPACE}, '{node}', '{provider}', 'i', 3, {gateway}, true, now(),
                     now() - make_interval(secs => {silent_seconds}))"
        ))
        .await;
    }

    pub(crate) async fn locate(&self, agent: i64, node: &str, provider: Option<&str>) {
        let provider = provider.map_or("NULL".to_owned(), |provider| format!("'{provider}'"));
        self.run(&format!("UPDATE agents SET node_id = '{node}', provider = {provider} WHERE agent_id = {agent}"))
            .await;
    }

    async fn status(&self, agent: i64) -> String {
        sqlx::query_scalar("SELECT status FROM agents WHERE agent_id = $1")
            .bind(agent)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }
}

#[tokio::test]
async fn a_silent_provider_is_disconnected_and_only_its_agents_go_offline() {
    let db = Database::fresh().await;
    for (agent, name) in [(1, "on_a"), (2, "on_b"), (3, "on_any"), (4, "elsewhere")] {
        db.agent(agent, name).await;
    }
    db.locate(1, "n1", Some("a")).await;
    db.locate(2, "n1", Some("b")).await;
    db.locate(3, "n1", None).await;
    db.locate(4, "n2", Some("a")).await;
    db.provider("n1", "a", 5, 50).await;
    db.provider("n1", "b", 5, 10).await;
    db.provider("n2", "a", 5, 10).await;

    let gone = db.store.disconnect_silent_providers(TTL, 100, db.now).await.unwrap();
    assert_eq!(gone.providers.len(), 1);
    let provider = &gone.providers[0];
    assert_eq!((provider.node_id.as_str(), provider.provider.as_str()), ("n1", "a"));
    assert_eq!((provider.gateway_id.get(), provider.epoch, provider.node_is_offline), (5, 4, false));
    assert_eq!(gone.agents.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>(), ["on_a"]);
    assert_eq!(db.status(1).await, "offline");
    for agent in [2, 3, 4] {
        assert_eq!(db.status(agent).await, "active");
    }
    assert_eq!(db.number("SELECT count(*) FROM providers WHERE gateway_id IS NULL").await, 1);
    assert!(db.store.disconnect_silent_providers(TTL, 100, db.now).await.unwrap().providers.is_empty());
}

#[tokio::test]
async fn the_last_provider_takes_the_unclaimed_agents_of_its_node_along() {
    let db = Database::fresh().await;
    db.agent(1, "bound_by_rest").await;
    db.locate(1, "n1", None).await;
    db.provider("n1", "a", 5, 60).await;
    db.provider("n1", "b", 5, 60).await;
    let gone = db.store.disconnect_silent_providers(TTL, 100, db.now).await.unwrap();
    assert_eq!(gone.providers.len(), 2);
    assert!(gone.providers.iter().all(|provider| provider.node_is_offline));
    assert_eq!(gone.agents.len(), 1);
    let reported: Vec<_> = gone.recorded.iter().flat_map(|recorded| &recorded.events).map(|e| &*e.kind).collect();
    assert_eq!(reported, ["agent.status.offline", "node.status.offline"], "the node once, though it had two providers");
}

#[tokio::test]
async fn a_dead_gateways_providers_are_disconnected_after_the_grace() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO gateways (gateway_id, lease_until) VALUES
         (1, now() + interval '3 seconds'), (2, now() - interval '2 seconds'), (3, now() - interval '6 seconds')",
    )
    .await;
    for gateway in 1..=4 {
        db.provider(&format!("n{gateway}"), "default", gateway, 0).await;
    }
    let gone = db.store.disconnect_orphaned_providers(100, db.now).await.unwrap();
    let gateways: Vec<_> = gone.providers.iter().map(|provider| provider.gateway_id.get()).collect();
    assert_eq!(gateways, [3, 4], "1 lives, 2 is within the grace, 4 gave its lease back");

    db.run("UPDATE gateways SET lease_until = now() + interval '1 day' WHERE gateway_id = 1").await;
    db.advance(2 * 3600).await;
    let hour = Duration::from_secs(3600);
    assert_eq!(db.store.remove_expired_gateways(hour).await.unwrap(), 1, "2 still has a provider");
}

#[tokio::test]
async fn disconnecting_is_bounded_and_goes_on() {
    let db = Database::fresh().await;
    for node in 0..5 {
        db.provider(&format!("n{node}"), "default", 8, 0).await;
    }
    for expected in [2, 2, 1, 0] {
        assert_eq!(db.store.disconnect_orphaned_providers(2, db.now).await.unwrap().providers.len(), expected);
    }
}

#[tokio::test]
async fn a_superseded_connection_replaces_no_token_of_an_agent() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    db.provider("n1", "a", 5, 0).await;
    let (scope, ada) = Database::mailbox(1);
    let [old, new] = ["old", "new"].map(TokenHash::from_token);
    sqlx::query(
        "INSERT INTO tokens (token_hash, kind, workspace_id, agent_id, created_at) VALUES ($1, 'agent', $2, 1, now())",
    )
    .bind(&old.as_bytes()[..])
    .bind(WORKSPACE)
    .execute(&db.pool)
    .await
    .unwrap();
    let host = async |epoch| {
        let fence = Fence { scope, node_id: NodeId::new("n1"), provider: ProviderName::new("a"), epoch };
        db.store.host_agent(&fence, db.hosting(ada, Some(new))).await.unwrap()
    };
    let tokens = async || {
        let hashes: Vec<Vec<u8>> =
            sqlx::query_scalar("SELECT token_hash FROM tokens").fetch_all(&db.pool).await.unwrap();
        let generation = db.number("SELECT token_generation FROM agents WHERE agent_id = 1").await;
        (hashes, generation)
    };
    let before = tokens().await;
    assert!(host(2).await.is_none(), "another connection has epoch 3");
    assert_eq!(tokens().await, before);
    let hosted = host(3).await.unwrap();
    assert_eq!((hosted.left, hosted.ended_tokens), (NodeId::direct(ada), vec![old]));
    assert_eq!(tokens().await, (vec![new.as_bytes().to_vec()], before.1 + 1));
}

fn registration(tags: &[&str]) -> ProviderRegistration {
    ProviderRegistration {
        node_name: String::new(),
        provider: ProviderName::default_provider(),
        instance_id: "i".to_owned(),
        capabilities: serde_json::json!([]),
        cursor_granted: false,
        tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
        version: "1".to_owned(),
        machine_id: None,
        max_agents: 1,
    }
}

#[tokio::test]
async fn direct_nodes_register_together_and_a_locked_one_delays_no_other() {
    let db = Database::fresh().await;
    let nodes = ["d1", "d2", "d3", "n1"].map(NodeId::new);
    for (node, role) in nodes.iter().zip(["direct", "direct", "direct", "broker"]) {
        db.run(&format!(
            "INSERT INTO nodes (workspace_id, node_id, name, role, created_at)
             VALUES ({WORKSPACE}, '{node}', '{node}', '{role}', now())"
        ))
        .await;
    }
    let scope = Database::mailbox(1).0;
    let [plain, tagged] = [registration(&[]), registration(&["a, b", "c"])];
    let claim = |node: usize, registration, requested_at| DirectClaim {
        scope,
        node: &nodes[node],
        gateway: GatewayId::new(5),
        requested_at,
        registration,
    };
    let mut lock = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM nodes WHERE node_id = 'd2' FOR UPDATE").execute(&mut *lock).await.unwrap();
    let claims =
        [claim(0, &plain, db.now), claim(1, &plain, db.now), claim(2, &tagged, db.now), claim(3, &plain, db.now)];
    let outcomes = db.store.register_direct_nodes(&claims, db.now).await.unwrap();
    let is_registered = |outcome: &Option<RegisterOutcome>| outcome.as_ref().map(|outcome| epoch_of(outcome).is_some());
    assert_eq!(outcomes.iter().map(is_registered).collect::<Vec<_>>(), [Some(true), None, Some(true), None]);
    lock.rollback().await.unwrap();
    let tags = "SELECT count(*) FROM providers WHERE node_id = 'd3' AND tags = ARRAY['a, b', 'c']";
    assert_eq!(db.number(tags).await, 1);
    assert_eq!(db.number("SELECT count(*) FROM nodes WHERE last_connected_at IS NOT NULL").await, 2);

    let alone = db.store.register_direct(claims[1], db.now).await.unwrap();
    assert!(epoch_of(&alone).is_some(), "{alone:?}");
    let of_broker = db.store.register_direct(claims[3], db.now).await.unwrap();
    assert!(matches!(of_broker, RegisterOutcome::NoNode), "{of_broker:?}");

    let earlier = db.now - TimeDelta::seconds(5);
    let again = [claim(0, &plain, earlier), claim(2, &plain, db.now)];
    let outcomes = db.store.register_direct_nodes(&again, db.now).await.unwrap();
    assert!(matches!(outcomes[0], Some(RegisterOutcome::Superseded)), "{:?}", outcomes[0]);
    let epoch = outcomes[1].as_ref().and_then(epoch_of).expect("registered");
    assert_eq!(db.number("SELECT epoch FROM providers WHERE node_id = 'd3'").await, epoch);

    let mut lock = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM providers WHERE node_id = 'd3' FOR UPDATE").execute(&mut *lock).await.unwrap();
    let claims = [claim(0, &plain, db.now), claim(2, &plain, db.now)];
    let outcomes = db.store.register_direct_nodes(&claims, db.now).await.unwrap();
    assert_eq!(outcomes.iter().map(is_registered).collect::<Vec<_>>(), [Some(true), None], "its provider is locked");
    lock.rollback().await.unwrap();
}

fn epoch_of(outcome: &RegisterOutcome) -> Option<i64> {
    if let RegisterOutcome::Registered { epoch, .. } = outcome { Some(*epoch) } else { None }
}
