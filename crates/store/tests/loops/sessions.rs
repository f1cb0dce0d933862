use relay_domain::{AgentId, InvocationId};

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
        self.store.note_release(scope, InvocationId::new(agent), id, true, self.now).await.unwrap();
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
    db.released(1, 121).await;
    assert_eq!(db.settled().await, [(AgentId::new(1), true)], "still there after two inventories");
    db.released(2, 5).await;
    db.run("UPDATE agents SET rebound_at = now() WHERE agent_id = 2").await;
    assert_eq!(db.settled().await.len(), 2, "brought up again since");
}
