use chrono::TimeDelta;
use relay_domain::{AgentId, InvocationId, NodeId, ProviderName, access::token::TokenHash};
use relay_store::{DeleteCondition, IdempotencyKey, LastSeen, RespawnOutcome, nodes::fence::Fence};

use crate::fixture::{Database, WORKSPACE};

impl Database {
    /// An agent on a broker whose release, which deletes it, has completed so many seconds ago.
    async fn released(&self, agent: i64, seconds: i64) {
        self.agent(agent, &format!("agent-{agent}")).await;
        self.run(&format!(
            "UPDATE agents SET node_id = 'n1', provider = 'a', binding_id = 'b', bound_at = now() - interval '1 hour'
              WHERE agent_id = {agent};
             INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, output,
                                      status, due_at, created_at, completed_at)
             VALUES ({WORKSPACE}, {agent}, 'release', 'release', 'x', '{{}}', '{{}}', 'completed', now(), now(),
                     now() - make_interval(secs => {seconds}))"
        ))
        .await;
        let (scope, id) = Self::mailbox(agent);
        self.store.record_release(scope, InvocationId::new(agent), id, true, self.now).await.unwrap();
    }

    async fn settled(&self) -> Vec<(AgentId, bool)> {
        let settled = self.store.settled_releases(100).await.unwrap();
        settled.into_iter().map(|release| (release.agent, release.deletes)).collect()
    }
}

/// The node's result may come before its word that the agent has ended.
#[tokio::test]
async fn a_release_that_deletes_waits_for_the_end_of_its_agent() {
    let db = Database::fresh().await;
    db.provider("n1", "a", 5, 0).await;
    db.released(1, 5).await;
    db.released(2, 5).await;
    assert!(db.settled().await.is_empty());
    db.run("UPDATE agents SET status = 'offline' WHERE agent_id = 1").await;
    assert_eq!(db.settled().await, [(AgentId::new(1), true)]);
    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 2").await;
    assert_eq!(db.settled().await.len(), 2, "somebody else has deleted it");
}

#[tokio::test]
async fn a_release_does_not_wait_for_an_agent_that_goes_on() {
    let db = Database::fresh().await;
    db.provider("n1", "a", 5, 0).await;
    db.released(1, 121).await;
    assert_eq!(db.settled().await, [(AgentId::new(1), true)], "still there after two inventories");
    db.released(2, 5).await;
    db.run("UPDATE agents SET rebound_at = now() WHERE agent_id = 2").await;
    assert_eq!(db.settled().await.len(), 2, "brought up again since");
}

/// An agent may call with its token until that is dead, and is active again for a while.
#[tokio::test]
async fn a_release_deletes_an_agent_that_calls_after_its_end() {
    let db = Database::fresh().await;
    db.provider("n1", "a", 5, 0).await;
    db.released(1, 5).await;
    let (scope, agent_id) = Database::mailbox(1);
    let fence = Fence { scope, node_id: NodeId::new("n1"), provider: ProviderName::new("a"), epoch: 3 };
    let delete = async |name: &str| {
        let only = DeleteCondition { has_ended: true, ..DeleteCondition::default() };
        db.store.delete_agent(scope, name, &only, db.now).await.unwrap().is_some()
    };
    assert!(!delete("agent-1").await, "its broker has it");
    db.store.unbind_hosted_agent(&fence, agent_id, db.now + TimeDelta::seconds(10)).await.unwrap().unwrap();
    let at = db.now + TimeDelta::seconds(20);
    let back = db.store.record_agents_seen(&[LastSeen { scope, agent_id, at }], at).await.unwrap();
    assert_eq!(back.len(), 1, "it is active");
    assert_eq!(db.settled().await, [(agent_id, true)]);
    assert!(delete("agent-1").await);

    // An http_push node has no connection, and an agent with a socket of its own stays online.
    db.agent(2, "pushed").await;
    db.agent(3, "connected").await;
    db.run(&format!(
        "INSERT INTO nodes (workspace_id, node_id, name, kind, created_at)
         VALUES ({WORKSPACE}, 'n2', 'hook', 'http_push', now());
         UPDATE agents SET node_id = 'n2' WHERE agent_id = 2"
    ))
    .await;
    db.provider("node_direct_3", "default", 5, 0).await;
    assert!(!delete("pushed").await && !delete("connected").await);
}

/// A gateway on a loaded machine may renew its lease late, and its agents run.
#[tokio::test]
async fn a_spawn_takes_no_agent_of_a_gateway_that_renews_its_lease_late() {
    let db = Database::fresh().await;
    db.agent(1, "worker").await;
    db.provider("n1", "a", 5, 0).await;
    db.locate(1, "n1", Some("a")).await;
    let (scope, _) = Database::mailbox(1);
    let key = IdempotencyKey { hash: [1; 32], fingerprint: [2; 32] };
    let respawn = async |late_seconds: i64| {
        db.run(&format!(
            "INSERT INTO gateways (gateway_id, lease_until) VALUES (5, now() - make_interval(secs => {late_seconds}))
             ON CONFLICT (gateway_id) DO UPDATE SET lease_until = excluded.lease_until"
        ))
        .await;
        db.store.respawn_agent(scope, "worker", &key, TokenHash::from_token("at_live_1"), db.now).await.unwrap()
    };
    assert!(matches!(respawn(1).await, RespawnOutcome::Hosted));
    assert!(matches!(respawn(6).await, RespawnOutcome::Adopted { .. }), "its agents are offline by then");
}
