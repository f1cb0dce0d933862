use relay_domain::{
    AgentId, NodeId, ProviderName,
    access::token::TokenHash,
    nodes::{NodeKind, NodeRole},
};
use relay_store::{
    BindOutcome, DirectTokenOutcome, EnrolOutcome, EnrolmentToken, NewBinding, NewDelivery, NodeEnrolment, StoreError,
};
use serde_json::json;

use crate::fixture::Database;

fn enrolment(id: Option<&str>, name: &str, token: &str) -> NodeEnrolment {
    NodeEnrolment {
        node_id: id.map(NodeId::new),
        fresh_id: NodeId::new(format!("node_{token}")),
        name: name.into(),
        machine_id: None,
        kind: NodeKind::Ws,
        delivery_adapter: None,
        delivery: None,
        role: None,
        capabilities: None,
        max_agents: None,
        tags: None,
        version: None,
        token: EnrolmentToken::New(TokenHash::from_token(token)),
        quota: None,
    }
}

async fn enrol(db: &Database, enrolment: &NodeEnrolment) -> EnrolOutcome {
    db.store.enrol_node(Database::mailbox(1).0, enrolment, db.now).await.unwrap().0
}

fn enrolled(node: &str, replaced: Option<&str>) -> EnrolOutcome {
    EnrolOutcome::Enrolled { node: NodeId::new(node), replaced_token: replaced.map(TokenHash::from_token) }
}

async fn goes_live(db: &Database, node: &str) {
    db.run(&format!(
        "INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, registered_at,
                                last_heartbeat_at)
         VALUES (7, '{node}', 'broker', 'i', 1, 1, now(), now())"
    ))
    .await;
}

fn binding<'a>(node: &'a NodeId, agent_name: &'a str, binding_id: &'a str) -> NewBinding<'a> {
    NewBinding { node, agent_name, binding_id, session_ref: None, priority: None }
}

#[tokio::test]
async fn a_node_is_found_by_id_then_name_then_machine() {
    let db = Database::fresh().await;
    let mut first = enrolment(Some("n1"), "box", "t1");
    first.machine_id = Some("m1".into());
    first.max_agents = Some(4);
    assert_eq!(enrol(&db, &first).await, enrolled("n1", None));
    assert_eq!(enrol(&db, &enrolment(Some("n1"), "renamed", "t2")).await, enrolled("n1", Some("t1")));
    assert_eq!(enrol(&db, &enrolment(None, "renamed", "t3")).await, enrolled("n1", Some("t2")));
    let mut by_machine = enrolment(None, "third", "t4");
    by_machine.machine_id = Some("m1".into());
    goes_live(&db, "n1").await;
    db.run("UPDATE providers SET gateway_id = NULL").await;
    assert_eq!(enrol(&db, &by_machine).await, enrolled("n1", Some("t3")));
    let node = db.store.node(Database::mailbox(1).0, "third").await.unwrap().unwrap();
    assert_eq!((node.node_id.as_str(), node.max_agents), ("n1", 4), "what is not said is kept");
    assert_eq!(enrol(&db, &enrolment(None, "fresh", "t5")).await, enrolled("node_t5", None));
}

#[tokio::test]
async fn a_name_goes_to_another_id_only_while_no_node_is_live_under_it() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    assert_eq!(enrol(&db, &enrolment(Some("n1"), "box", "t1")).await, enrolled("n1", None));
    db.run("UPDATE agents SET node_id = 'n1', provider = 'broker' WHERE agent_id = 1").await;
    assert_eq!(enrol(&db, &enrolment(Some("n2"), "box", "t2")).await, enrolled("n2", Some("t1")));
    let (node, provider): (String, Option<String>) =
        sqlx::query_as("SELECT node_id, provider FROM agents WHERE agent_id = 1").fetch_one(&db.pool).await.unwrap();
    assert_eq!((node.as_str(), provider), ("n2", None), "the agents follow");
    goes_live(&db, "n2").await;
    assert_eq!(enrol(&db, &enrolment(Some("n3"), "box", "t3")).await, EnrolOutcome::NameTaken);
    assert_eq!(enrol(&db, &enrolment(Some("n4"), "other", "t4")).await, enrolled("n4", None));
    assert_eq!(enrol(&db, &enrolment(Some("n4"), "box", "t5")).await, EnrolOutcome::NameTaken);
}

#[tokio::test]
async fn a_machine_finds_only_a_broker_that_was_connected_and_is_offline() {
    let db = Database::fresh().await;
    let of_machine = |id, name: &str| NodeEnrolment { machine_id: Some("m1".into()), ..enrolment(id, name, name) };
    assert_eq!(enrol(&db, &of_machine(Some("n1"), "box")).await, enrolled("n1", None));
    assert_eq!(enrol(&db, &of_machine(None, "second")).await, enrolled("node_second", None), "it never connected");
    goes_live(&db, "n1").await;
    assert_eq!(enrol(&db, &of_machine(None, "third")).await, enrolled("node_third", None), "it is live");
    db.run("UPDATE providers SET gateway_id = NULL").await;
    for (name, kind, role) in [("fourth", NodeKind::Poll, None), ("fifth", NodeKind::Ws, Some(NodeRole::Direct))] {
        let other = NodeEnrolment { kind, role, ..of_machine(None, name) };
        assert_eq!(enrol(&db, &other).await, enrolled(&format!("node_{name}"), None), "another kind or role");
    }
    assert_eq!(enrol(&db, &of_machine(None, "sixth")).await, enrolled("n1", Some("box")), "it is offline");
    // Its provider has deregistered: the node remembers that it was connected.
    db.run("DELETE FROM providers; UPDATE nodes SET last_connected_at = now() WHERE node_id = 'n1'").await;
    assert_eq!(enrol(&db, &of_machine(None, "seventh")).await, enrolled("n1", Some("sixth")));
}

#[tokio::test]
async fn a_name_stays_with_its_node_for_a_day_after_it_was_live() {
    let db = Database::fresh().await;
    assert_eq!(enrol(&db, &enrolment(Some("n1"), "box", "t1")).await, enrolled("n1", None));
    db.run("UPDATE nodes SET last_connected_at = now() - interval '23 hours'").await;
    assert_eq!(enrol(&db, &enrolment(Some("n2"), "box", "t2")).await, EnrolOutcome::NameTaken);
    assert_eq!(enrol(&db, &enrolment(Some("n1"), "box", "t3")).await, enrolled("n1", Some("t1")), "its own id");
    goes_live(&db, "n1").await;
    db.run("UPDATE nodes SET last_connected_at = now() - interval '25 hours'").await;
    assert_eq!(enrol(&db, &enrolment(Some("n2"), "box", "t4")).await, EnrolOutcome::NameTaken, "it was live since");
    db.run("UPDATE providers SET gateway_id = NULL, last_heartbeat_at = now() - interval '25 hours'").await;
    assert_eq!(enrol(&db, &enrolment(Some("n2"), "box", "t5")).await, enrolled("n2", Some("t3")));
}

#[tokio::test]
async fn first_enrolments_of_one_name_at_once_make_one_node() {
    let db = Database::fresh().await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (store, now) = (db.store.clone(), db.now);
        tasks.spawn(async move {
            let request = enrolment(None, "box", &format!("t{n}"));
            store.enrol_node(Database::mailbox(1).0, &request, now).await.unwrap().0
        });
    }
    while let Some(done) = tasks.join_next().await {
        assert!(matches!(done.unwrap(), EnrolOutcome::Enrolled { .. }));
    }
    let (nodes, tokens): (i64, i64) =
        sqlx::query_as("SELECT (SELECT count(*) FROM nodes), (SELECT count(*) FROM tokens)")
            .fetch_one(&db.pool)
            .await
            .unwrap();
    assert_eq!((nodes, tokens), (1, 1));
}

#[tokio::test]
async fn delivery_settings_are_stored_for_the_node_that_they_were_encrypted_for() {
    let db = Database::fresh().await;
    let pushed = |token: &str| {
        let first = enrolment(None, "hook", token);
        let node_id = first.fresh_id.clone();
        let delivery = Some(NewDelivery { node_id, public: json!({ "url": token }), sealed: None });
        NodeEnrolment { kind: NodeKind::HttpPush, delivery, ..first }
    };
    assert_eq!(enrol(&db, &pushed("t1")).await, enrolled("node_t1", None));
    // Neither of the two found a node of this name.
    assert_eq!(enrol(&db, &pushed("t2")).await, EnrolOutcome::Raced);
    let url: String = sqlx::query_scalar("SELECT delivery ->> 'url' FROM nodes WHERE name = 'hook'")
        .fetch_one(&db.pool)
        .await
        .unwrap();
    assert_eq!(url, "t1");
    assert_eq!(enrol(&db, &enrolment(None, "hook", "t3")).await, enrolled("node_t1", Some("t1")), "the token is kept");
}

#[tokio::test]
async fn nodes_are_locked_in_the_order_of_their_ids_whatever_matches_best() {
    let db = Database::fresh().await;
    enrol(&db, &enrolment(Some("n1"), "first", "t1")).await;
    enrol(&db, &enrolment(Some("n2"), "second", "t2")).await;
    let mut other = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM nodes WHERE node_id = 'n1' FOR UPDATE").execute(&mut *other).await.unwrap();
    // The id is that of one node, the name that of the other.
    let request = enrolment(Some("n2"), "first", "t3");
    let refused = async {
        loop {
            // A lock that is not given for 2 s is asked for again, as clients do.
            match db.store.enrol_node(Database::mailbox(1).0, &request, db.now).await {
                Err(StoreError::Aborted { .. }) => {}
                done => return done.unwrap().0,
            }
        }
    };
    let look = async {
        db.lock_is_awaited().await;
        let free = "SELECT count(*) FROM (SELECT 1 FROM nodes WHERE node_id = 'n2' FOR UPDATE SKIP LOCKED) AS free";
        let is_free = db.number(free).await == 1;
        other.rollback().await.unwrap();
        is_free
    };
    assert_eq!(tokio::join!(refused, look), (EnrolOutcome::NameTaken, true));
}

#[tokio::test]
async fn an_agents_own_node_rotates_its_token_until_the_agent_is_bound() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, ada) = Database::mailbox(1);
    for (token, replaced) in [("t1", None), ("t2", Some("t1"))] {
        let outcome = db.store.mint_direct_token(scope, ada, 1, TokenHash::from_token(token)).await.unwrap();
        assert_eq!(outcome, DirectTokenOutcome::Minted { replaced_token: replaced.map(TokenHash::from_token) });
    }
    enrol(&db, &enrolment(Some("n1"), "box", "t3")).await;
    let bound = db.store.bind_agent(scope, binding(&NodeId::new("n1"), "ada", "anb_1"), db.now).await.unwrap();
    assert!(matches!(bound, BindOutcome::Bound { from, .. } if from == NodeId::direct(ada)));
    let outcome = db.store.mint_direct_token(scope, ada, 1, TokenHash::from_token("t4")).await.unwrap();
    assert_eq!(outcome, DirectTokenOutcome::BoundElsewhere(NodeId::new("n1")));
    let unknown = db.store.mint_direct_token(scope, AgentId::new(5), 1, TokenHash::from_token("t5")).await.unwrap();
    assert_eq!(unknown, DirectTokenOutcome::NoAgent);
    let unbind = || async { db.store.unbind_agent(scope, &NodeId::new("n1"), "ada", db.now).await.unwrap() };
    assert_eq!(unbind().await.map(|unbound| unbound.agent), Some(ada));
    assert!(unbind().await.is_none());
}

#[tokio::test]
async fn a_bind_takes_the_only_provider_and_respects_capacity() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    for (agent, name) in [(1, "ada"), (2, "bob"), (3, "cyd")] {
        db.agent(agent, name).await;
    }
    enrol(&db, &enrolment(Some("n1"), "box", "t1")).await;
    goes_live(&db, "n1").await;
    db.run("UPDATE providers SET max_agents = 2").await;
    let node = NodeId::new("n1");
    let bind = async |name: &str, id: &str| db.store.bind_agent(scope, binding(&node, name, id), db.now).await.unwrap();
    assert!(matches!(bind("ada", "anb_1").await, BindOutcome::Bound { .. }));
    assert!(matches!(bind("ada", "anb_2").await, BindOutcome::Bound { from, .. } if from == node));
    assert!(matches!(bind("bob", "anb_3").await, BindOutcome::Bound { .. }));
    assert!(matches!(bind("cyd", "anb_4").await, BindOutcome::Full { max_agents: 2 }));
    assert!(matches!(bind("dan", "anb_5").await, BindOutcome::NoAgent));
    let bindings = db.store.bindings(scope, &node, None, 10).await.unwrap();
    let seen: Vec<_> = bindings
        .iter()
        .map(|b| (b.agent_name.as_str(), b.binding_id.as_deref(), b.provider.as_ref().map(ProviderName::as_str)))
        .collect();
    assert_eq!(seen, [("ada", Some("anb_1"), Some("broker")), ("bob", Some("anb_3"), Some("broker"))]);
}

/// Clients that only handle actions ignore what is delivered to them.
#[tokio::test]
async fn a_bind_takes_the_provider_that_has_agents_and_not_one_beside_it() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    for (agent, name) in [(1, "ada"), (2, "bob"), (3, "cyd")] {
        db.agent(agent, name).await;
    }
    enrol(&db, &enrolment(Some("n1"), "box", "t1")).await;
    db.run(
        r#"INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, capabilities,
                                  cursor_granted, version, registered_at, last_heartbeat_at)
           VALUES (7, 'n1', 'broker', 'i', 1, 1, '[{"name":"spawn:sh","kind":"capacity"}]', true, 'x/1', now(), now()),
                  (7, 'n1', 'tools', 'i', 1, 1, '[{"name":"build","kind":"action"}]', false, 'y/1', now(), now())"#,
    )
    .await;
    let node = NodeId::new("n1");
    let bind = async |name: &str| {
        let bound = db.store.bind_agent(scope, binding(&node, name, "anb"), db.now).await.unwrap();
        assert!(matches!(bound, BindOutcome::Bound { .. }));
        let bindings = db.store.bindings(scope, &node, None, 10).await.unwrap();
        let bound = bindings.into_iter().find(|binding| binding.agent_name == name).unwrap();
        bound.provider.map(|provider| provider.to_string())
    };
    let served = async |provider: &str| {
        let provider = ProviderName::new(provider);
        let positions = db.store.positions_of_providers(&[(scope, node.clone(), provider)]).await.unwrap().remove(0);
        positions.into_iter().map(|position| position.agent_name).collect::<Vec<_>>()
    };
    assert_eq!(bind("ada").await.as_deref(), Some("broker"));
    db.run("UPDATE providers SET gateway_id = NULL WHERE provider = 'broker'").await;
    assert_eq!(bind("bob").await, None, "the broker is unavailable for a moment");
    assert!(served("tools").await.is_empty());
    assert_eq!(served("broker").await, ["ada", "bob"]);
    // One that was silent for days keeps nothing.
    db.run("UPDATE providers SET last_heartbeat_at = now() - interval '2 days' WHERE provider = 'broker'").await;
    assert_eq!(served("tools").await, ["bob"]);
    db.run("DELETE FROM providers WHERE provider = 'broker'").await;
    assert_eq!(bind("cyd").await.as_deref(), Some("tools"), "there is no other");
}

#[tokio::test]
async fn providers_that_are_equally_fit_share_the_agents_of_no_particular_one() {
    let db = Database::fresh().await;
    let (scope, ada) = Database::mailbox(1);
    db.agent(1, "ada").await;
    enrol(&db, &enrolment(Some("n1"), "box", "t1")).await;
    goes_live(&db, "n1").await;
    db.run(
        "INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, registered_at,
                                last_heartbeat_at)
         VALUES (7, 'n1', 'other', 'i', 1, 1, now(), now())",
    )
    .await;
    let node = NodeId::new("n1");
    let served = async |provider: &str| {
        let key = (scope, node.clone(), ProviderName::new(provider));
        let positions = db.store.positions_of_providers(&[key]).await.unwrap().remove(0);
        positions.into_iter().map(|position| position.agent_id).collect::<Vec<_>>()
    };
    db.store.bind_agent(scope, binding(&node, "ada", "anb"), db.now).await.unwrap();
    for provider in ["broker", "other", "not registered yet"] {
        assert_eq!(served(provider).await, [ada], "{provider}");
    }
    // A broker of a version without the cursor says that it is one.
    db.run("UPDATE providers SET version = 'relay-broker/9.1.6' WHERE provider = 'broker'").await;
    assert_eq!(served("broker").await, [ada]);
    assert!(served("other").await.is_empty());
}

#[tokio::test]
async fn a_node_under_another_id_keeps_what_is_not_its_old_providers() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    enrol(&db, &enrolment(Some("n1"), "box", "t1")).await;
    db.run(
        "UPDATE agents SET node_id = 'n9', provider = 'p', session_ref = 's', session_node_id = 'n1' WHERE agent_id = 1;
         INSERT INTO node_capabilities (workspace_id, node_id, provider, name, kind, queue, tells_caller)
         VALUES (7, 'n1', 'tools', 'build', 'action', false, false), (7, 'n2', 'gone', 'old', 'action', false, false);
         INSERT INTO actions (workspace_id, action_id, name, claims_name, handler_node_id, provider, created_at)
         VALUES (7, 1, 'build', true, 'n1', 'tools', now()), (7, 2, 'deploy', true, 'n1', NULL, now()),
                (7, 3, 'old', false, 'n2', 'gone', now()), (7, 4, 'deploy', false, 'n2', NULL, now()),
                (7, 5, 'build', false, 'n3', 'tools', now());
         INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, target_node_id, caller_name,
                                  input, status, due_at, created_at, completed_at)
         VALUES (7, 1, 'deploy', 'deploy', 'n1', 'x', '{}', 'pending', now(), now(), NULL),
                (7, 2, 'deploy', 'deploy', 'n1', 'x', '{}', 'completed', now(), now(), now())",
    )
    .await;
    assert_eq!(enrol(&db, &enrolment(Some("n2"), "box", "t2")).await, enrolled("n2", Some("t1")));
    let actions: Vec<(i64, String)> =
        sqlx::query_as("SELECT action_id, handler_node_id FROM actions ORDER BY action_id")
            .fetch_all(&db.pool)
            .await
            .unwrap();
    assert_eq!(
        actions,
        [(2, "n2".to_owned()), (5, "n3".to_owned())],
        "what providers advertised is theirs to say again"
    );
    assert_eq!(db.number("SELECT count(*) FROM node_capabilities").await, 0);
    let agent: (String, Option<String>, Option<String>) =
        sqlx::query_as("SELECT node_id, provider, session_node_id FROM agents WHERE agent_id = 1")
            .fetch_one(&db.pool)
            .await
            .unwrap();
    assert_eq!(agent, ("n9".to_owned(), Some("p".to_owned()), Some("n2".to_owned())), "its session, not its place");
    let targets: Vec<String> = sqlx::query_scalar("SELECT target_node_id FROM invocations ORDER BY invocation_id")
        .fetch_all(&db.pool)
        .await
        .unwrap();
    assert_eq!(targets, ["n2", "n1"], "what has ended stays as it was");
}
