use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{AgentId, GatewayId, InvocationId, NodeId, ProviderName, WorkspaceScope};
use relay_store::{
    SentInvocation, StoreError,
    actions::outcomes::{InvocationOutcome, OutcomeBatch, OutcomeRecording, OutcomeSource},
    agents::spawn::InventoryReconciliation,
    nodes::{
        fence::Fence,
        hosting::{InventoryOutcome, ListedAgent},
    },
};
use serde_json::{Value, json};

use crate::fixture::{Database, WORKSPACE};

const ALL: i64 = 100;
/// The epoch of the fixture's providers.
const EPOCH: i64 = 3;

fn scope() -> WorkspaceScope {
    Database::mailbox(0).0
}

fn fence(node: &str, provider: &str) -> Fence {
    Fence { scope: scope(), node_id: NodeId::new(node), provider: ProviderName::new(provider), epoch: EPOCH }
}

/// Outcome that the provider `a` of the node `n1` reports.
fn outcome_of(invocation: i64, result: Result<Value, String>) -> InvocationOutcome {
    InvocationOutcome {
        scope: scope(),
        invocation: InvocationId::new(invocation),
        source: OutcomeSource::Provider(fence("n1", "a")),
        result,
        duration_ms: None,
        is_release_ended: false,
    }
}

/// Returns the invocations that ended, each with its error.
fn ended(done: &OutcomeBatch) -> Vec<(i64, Option<&str>)> {
    let recorded = done.outcomes.iter().filter_map(|outcome| match outcome {
        OutcomeRecording::Recorded(row) => Some((row.invocation_id.get(), row.error.as_deref())),
        OutcomeRecording::Refused | OutcomeRecording::OpenRelease(_) => None,
    });
    let mut ended: Vec<_> = recorded.collect();
    ended.sort_unstable();
    ended
}

impl Database {
    /// Nodes that can bring agents up, each with the provider `a` on a gateway that lives.
    async fn hosts(&self, nodes: &[&str]) {
        self.run("INSERT INTO gateways (gateway_id, lease_until) VALUES (5, now() + interval '1 hour')").await;
        for node in nodes {
            self.provider(node, "a", 5, 0).await;
            self.run(&format!(
                "INSERT INTO node_capabilities (workspace_id, name, node_id, provider, kind, queue, tells_caller)
                 VALUES ({WORKSPACE}, 'spawn:sh', '{node}', 'a', 'capacity', false, false)"
            ))
            .await;
        }
    }

    /// A spawn that the provider `a` of a node was sent a moment ago.
    async fn spawn(&self, invocation: i64, node: &str) {
        self.run(&format!(
            "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, status,
                                      attempt, node_id, provider, dispatched_at, sent_epoch, sent_at, reserves, due_at,
                                      created_at)
             VALUES ({WORKSPACE}, {invocation}, 'spawn', 'spawn:sh', 'x', '{{}}', 'dispatched', 1, '{node}', 'a', now(),
                     {EPOCH}, now(), true, now() + interval '30 seconds', now())"
        ))
        .await;
    }

    /// An agent that has registered for a spawn, online on the provider `a` of a node.
    async fn born(&self, invocation: i64, agent: i64, node: &str) {
        self.agent(agent, &format!("agent-{agent}")).await;
        self.locate(agent, node, Some("a")).await;
        let invocation = InvocationId::new(invocation);
        assert!(self.store.link_spawned_agent(&fence(node, "a"), invocation, AgentId::new(agent)).await.unwrap());
    }

    /// Inserts an invocation that was sent to its handler over the connection of a provider.
    async fn handled(&self, invocation: i64, agent: i64, provider: &str) {
        self.run(&format!(
            "INSERT INTO invocations (workspace_id, invocation_id, action_name, handler_agent_id, caller_name, input,
                                      status, node_id, provider, sent_epoch, sent_at, due_at, created_at)
             SELECT {WORKSPACE}, {invocation}, 'double', {agent}, 'x', '{{}}', 'invoked', node_id, '{provider}', {EPOCH},
                    now(), now(), now()
               FROM agents WHERE agent_id = {agent}"
        ))
        .await;
    }

    async fn connected(&self, node: &str, gateway: &str) {
        self.run(&format!("UPDATE providers SET gateway_id = {gateway} WHERE node_id = '{node}'")).await;
    }

    /// (status, agent) of an invocation.
    async fn state(&self, invocation: i64) -> (String, Option<i64>) {
        sqlx::query_as("SELECT status, agent_id FROM invocations WHERE invocation_id = $1")
            .bind(invocation)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// Reconciles invocations with an inventory of these agents, as (agent, invocation).
    async fn inventory(&self, node: &str, agents: &[(i64, i64)]) -> InventoryReconciliation {
        let listed: Vec<ListedAgent> = agents
            .iter()
            .map(|(agent, invocation)| ListedAgent {
                agent_id: AgentId::new(*agent),
                name: format!("agent-{agent}"),
                session_ref: None,
                invocation: Some(InvocationId::new(*invocation)),
            })
            .collect();
        match self.store.sync_inventory(&fence(node, "a"), &listed, self.now).await.unwrap() {
            InventoryOutcome::Synced { reconciled, .. } => reconciled,
            other @ (InventoryOutcome::Conflicts(_) | InventoryOutcome::Superseded) => panic!("{other:?}"),
        }
    }

    /// Both steps of losing what a provider was doing: its time to come back passes in between.
    async fn lose(&self) -> u64 {
        assert_eq!(
            self.store.reclaim_lost_invocations(ALL, self.now).await.unwrap(),
            0,
            "it has a moment to come back"
        );
        self.store.reclaim_lost_invocations(ALL, self.now + TimeDelta::seconds(3)).await.unwrap()
    }
}

fn state(status: &str, agent: Option<i64>) -> (String, Option<i64>) {
    (status.to_owned(), agent)
}

#[tokio::test]
async fn a_spawn_whose_agent_has_registered_is_not_taken_back_for_silence() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.spawn(102, "n1").await;
    db.born(101, 1, "n1").await;
    let late = db.now + TimeDelta::seconds(90);
    assert_eq!(db.store.reclaim_lost_invocations(ALL, late).await.unwrap(), 1);
    assert_eq!(db.state(101).await, state("dispatched", Some(1)));
    assert_eq!(db.state(102).await, state("pending", None));
    assert_eq!(db.number("SELECT count(*) FROM invocations WHERE reserves").await, 0);

    // An inventory that lacks the agent says that it did not come up.
    db.run("UPDATE invocations SET sent_at = sent_at - interval '5 minutes' WHERE invocation_id = 101").await;
    assert_eq!(db.inventory("n1", &[]).await.rescheduled, 1);
    assert_eq!(db.state(101).await, state("pending", None));
}

#[tokio::test]
async fn a_spawn_that_was_taken_back_completes_by_the_inventory_that_lists_its_agent() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.born(101, 1, "n1").await;
    db.connected("n1", "NULL").await;
    assert_eq!(db.lose().await, 1);
    assert_eq!(db.state(101).await, state("pending", Some(1)));

    db.connected("n1", "5").await;
    assert_eq!(
        db.inventory("n1", &[(1, 101)]).await,
        InventoryReconciliation { open: 0, completed: 1, rescheduled: 0 }
    );
    // It goes nowhere any more, and does not fail for having waited.
    let later = db.now + TimeDelta::seconds(300);
    assert!(db.store.workspaces_with_due_invocations(later).await.unwrap().is_empty());
    assert_eq!(db.store.redispatch(scope(), ALL, 1, later).await.unwrap().examined, 0);
    assert!(db.store.fail_unservable(ALL, later).await.unwrap().outcomes.is_empty());
    let done = db.store.finish_spawned(Duration::from_secs(2), ALL, later).await.unwrap();
    assert_eq!(ended(&done), [(101, None)]);
    assert_eq!(db.state(101).await, state("completed", Some(1)));
    // One outcome: what its provider says afterwards is refused.
    let outcome = outcome_of(101, Err("spawn_agent_name_in_use".to_owned()));
    assert!(ended(&db.store.record_outcomes(&[outcome], later).await.unwrap()).is_empty());
    assert_eq!(db.number("SELECT count(*) FROM invocations WHERE reserves").await, 0);
}

#[tokio::test]
async fn an_inventory_completes_nothing_that_has_gone_to_another_node() {
    let db = Database::fresh().await;
    db.hosts(&["n1", "n2"]).await;
    db.spawn(101, "n1").await;
    db.born(101, 1, "n1").await;
    db.connected("n1", "NULL").await;
    assert_eq!(db.lose().await, 1);
    let sent = db.store.redispatch(scope(), ALL, 1, db.now + TimeDelta::seconds(60)).await.unwrap().sent;
    assert_eq!(sent.iter().map(|sent| sent.dispatch.node_id.as_str()).collect::<Vec<_>>(), ["n2"]);
    assert_eq!(db.state(101).await, state("dispatched", None));
    db.connected("n1", "5").await;
    assert_eq!(db.inventory("n1", &[(1, 101)]).await, InventoryReconciliation::default());
    assert_eq!(db.state(101).await, state("dispatched", None));
}

#[tokio::test]
async fn a_spawn_that_goes_to_its_node_again_knows_the_agent_that_came_up_there() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.born(101, 1, "n1").await;
    db.connected("n1", "NULL").await;
    assert_eq!(db.lose().await, 1);
    // Its agents are offline with it, and it says that it runs one of that name before it says which it runs.
    db.run("UPDATE agents SET status = 'offline' WHERE agent_id = 1").await;
    db.connected("n1", "5").await;
    let sent = db.store.redispatch(scope(), ALL, 1, db.now + TimeDelta::seconds(60)).await.unwrap().sent;
    assert_eq!(sent.iter().map(|sent| sent.dispatch.attempt).collect::<Vec<_>>(), [2]);
    assert_eq!(db.state(101).await, state("dispatched", Some(1)));
    let output = db.store.spawned_agent_output(&fence("n1", "a"), InvocationId::new(101)).await.unwrap();
    assert_eq!(output.map(|output| output["name"].clone()), Some(json!("agent-1")));
}

#[tokio::test]
async fn an_invocation_fails_when_its_handler_was_unavailable_for_two_minutes() {
    let db = Database::fresh().await;
    for (agent, node) in [(1, "leaves"), (2, "stays"), (3, "returns"), (4, "moves"), (5, "claims"), (6, "unbound")] {
        db.agent(agent, &format!("agent-{agent}")).await;
        if agent < 5 {
            db.provider(node, "a", 5, 0).await;
            db.locate(agent, node, Some("a")).await;
        }
        db.handled(100 + agent, agent, "a").await;
    }
    db.run(&format!(
        "INSERT INTO nodes (workspace_id, node_id, name, kind, created_at)
         VALUES ({WORKSPACE}, 'claims', 'claims', 'poll', now())"
    ))
    .await;
    db.locate(5, "claims", None).await;
    for node in ["leaves", "returns", "moves"] {
        db.connected(node, "NULL").await;
    }
    let unreachable = "SELECT count(*) FROM invocations WHERE unreachable_since IS NOT NULL";
    db.store.reclaim_lost_invocations(ALL, db.now).await.unwrap();
    assert_eq!(db.number(unreachable).await, 4, "three whose node is gone, and one whose agent has none any more");

    db.connected("returns", "5").await;
    db.locate(4, "stays", Some("a")).await;
    let soon = db.now + TimeDelta::seconds(119);
    assert!(db.store.fail_unservable(ALL, soon).await.unwrap().outcomes.is_empty());
    let late = db.now + TimeDelta::seconds(121);
    let done = db.store.fail_unservable(ALL, late).await.unwrap();
    let why = Some("handler_unavailable");
    assert_eq!(ended(&done), [(101, why), (106, why)], "those that are back are not judged by an old note");

    // The time of one that was back begins again.
    db.store.reclaim_lost_invocations(ALL, late).await.unwrap();
    assert_eq!(db.number(unreachable).await, 2, "of the two that ended");
    db.connected("returns", "NULL").await;
    db.store.reclaim_lost_invocations(ALL, late).await.unwrap();
    assert!(db.store.fail_unservable(ALL, late + TimeDelta::seconds(119)).await.unwrap().outcomes.is_empty());
    let done = db.store.fail_unservable(ALL, late + TimeDelta::seconds(121)).await.unwrap();
    assert_eq!(ended(&done), [(103, why)]);
}

#[tokio::test]
async fn the_outcome_of_a_release_is_recorded_after_the_end_of_its_agent() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.spawn(102, "n1").await;
    db.run(&format!("INSERT INTO agent_releases VALUES ({WORKSPACE}, 101, 1, false, now())")).await;
    let released = outcome_of(101, Ok(json!({ "released": true })));
    let batch = [released.clone(), outcome_of(102, Ok(Value::Null))];
    let done = db.store.record_outcomes(&batch, db.now).await.unwrap();
    assert!(matches!(&done.outcomes[0], OutcomeRecording::OpenRelease(one) if one.invocation == released.invocation));
    assert_eq!(ended(&done), [(102, None)]);
    assert_eq!(db.state(101).await, state("dispatched", None));
    // Beside a durable one, too.
    db.spawn(103, "n1").await;
    db.agent(1, "caller").await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    db.run("UPDATE invocations SET caller_id = 1, durable = true WHERE invocation_id = 103").await;
    let batch = [released.clone(), outcome_of(103, Ok(Value::Null))];
    let done = db.store.record_outcomes(&batch, db.now).await.unwrap();
    assert!(matches!(&done.outcomes[0], OutcomeRecording::OpenRelease(_)));
    assert_eq!((ended(&done), done.mailboxes.len()), (vec![(103, None)], 1));
    let released = InvocationOutcome { is_release_ended: true, ..released };
    let done = db.store.record_outcomes(&[released], db.now).await.unwrap();
    assert_eq!(ended(&done), [(101, None)]);
}

#[tokio::test]
async fn an_outcome_after_a_success_that_leaves_a_release_open_is_recorded() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.run(&format!("INSERT INTO agent_releases VALUES ({WORKSPACE}, 101, 1, false, now())")).await;
    let released = outcome_of(101, Ok(json!({ "released": true })));
    let failed = InvocationOutcome { is_release_ended: true, ..outcome_of(101, Err("no such agent".to_owned())) };
    let done = db.store.record_outcomes(&[released, failed], db.now).await.unwrap();
    assert_eq!(ended(&done), [(101, Some("no such agent"))]);
    assert!(matches!(done.outcomes[1], OutcomeRecording::Recorded(_)));
    assert_eq!(db.state(101).await, state("failed", None));
}

#[tokio::test]
async fn a_durable_outcome_is_found_without_a_lock() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    db.agent(1, "caller").await;
    db.spawn(101, "n1").await;
    db.spawn(102, "n1").await;
    db.run("UPDATE invocations SET caller_id = 1, durable = invocation_id = 102").await;
    let mut other = db.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM invocations FOR UPDATE").execute(&mut *other).await.unwrap();
    let batch = [outcome_of(101, Ok(Value::Null)), outcome_of(102, Ok(Value::Null))];
    let record = async {
        loop {
            // A lock that is not given for 2 s is asked for again, as the engine does.
            match db.store.record_outcomes(&batch, db.now).await {
                Err(StoreError::Aborted { .. }) => {}
                done => return done.unwrap(),
            }
        }
    };
    let release = async {
        // A statement before it that takes locks has a commit of its own, for which the whole batch waits.
        relay_testkit::wait::until("the statement with deliveries to wait", Duration::from_secs(30), async || {
            db.number(
                "SELECT count(*) FROM pg_stat_activity JOIN pg_locks USING (pid)
                  WHERE datname = current_database() AND wait_event_type = 'Lock'
                    AND relation = 'deliveries'::regclass",
            )
            .await
                > 0
        })
        .await;
        other.commit().await.unwrap();
    };
    let (done, ()) = tokio::join!(record, release);
    assert_eq!((ended(&done), done.mailboxes.len()), (vec![(101, None), (102, None)], 1));
}

#[tokio::test]
async fn each_outcome_has_its_event_and_a_durable_one_its_delivery() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    db.agent(1, "caller").await;
    for invocation in 101..=104 {
        db.spawn(invocation, "n1").await;
    }
    db.run("UPDATE invocations SET caller_id = 1, durable = invocation_id = 102").await;
    // The first of two counts, and the batch is in no order.
    let batch = [
        outcome_of(103, Ok(json!(7))),
        outcome_of(102, Ok(json!({ "text": "\"quoted\" [1,2]" }))),
        outcome_of(101, Err("out of order".to_owned())),
        outcome_of(103, Err("too late".to_owned())),
    ];
    let done = db.store.record_outcomes(&batch, db.now).await.unwrap();
    assert_eq!(ended(&done), [(101, Some("out of order")), (102, None), (103, None)]);
    assert!(matches!(done.outcomes[3], OutcomeRecording::Refused));
    assert_eq!(done.mailboxes.len(), 1);
    assert_eq!(done.notices.iter().map(|notice| notice.invocation.get()).collect::<Vec<_>>(), [101, 103]);
    assert_eq!(db.number("SELECT source_id FROM deliveries").await, 102);
    // The announced events equal the stored ones, in the same order.
    let [announced] = &done.recorded[..] else { panic!("one workspace") };
    let stored = db.store.events_since(scope(), announced.first_seq - 1, 10).await.unwrap();
    assert_eq!(stored.len(), 1);
    assert_eq!((stored[0].first_seq, &stored[0].events), (announced.first_seq, &announced.events));
    assert_eq!(
        announced.events.iter().map(|event| &*event.kind).collect::<Vec<_>>(),
        ["action.failed", "action.completed", "action.completed"]
    );
    // Without a durable one it is another statement.
    let done = db.store.record_outcomes(&[outcome_of(104, Ok(json!(null)))], db.now).await.unwrap();
    let stored = db.store.events_since(scope(), announced.first_seq + 2, 10).await.unwrap();
    assert_eq!((stored[0].first_seq, &stored[0].events), (announced.first_seq + 3, &done.recorded[0].events));
    assert_eq!((done.mailboxes.len(), done.notices.len()), (0, 1));
}

#[tokio::test]
async fn a_notice_goes_to_the_only_gateway_of_its_caller() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.agent(1, "caller").await;
    db.provider("n2", "a", 6, 0).await;
    let gateway_of_notice = async |invocation| {
        db.spawn(invocation, "n1").await;
        db.run("UPDATE invocations SET caller_id = 1").await;
        let done = db.store.record_outcomes(&[outcome_of(invocation, Ok(Value::Null))], db.now).await.unwrap();
        done.notices.into_iter().map(|notice| notice.gateway_id.map(GatewayId::get)).collect::<Vec<_>>()
    };
    assert_eq!(gateway_of_notice(101).await, [None], "its node has no connection");
    db.locate(1, "n2", Some("a")).await;
    assert_eq!(gateway_of_notice(102).await, [Some(6)]);
    db.locate(1, "n2", None).await;
    assert_eq!(gateway_of_notice(103).await, [Some(6)]);
    db.provider("n2", "b", 5, 0).await;
    assert_eq!(gateway_of_notice(104).await, [None], "either gateway may serve it");
    db.locate(1, "n2", Some("b")).await;
    assert_eq!(gateway_of_notice(105).await, [Some(5)]);
}

/// Frame of an invocation that the agent handles, written over the provider `a` of the node `n1`.
fn frame_of(invocation: i64) -> SentInvocation {
    SentInvocation {
        scope: scope(),
        invocation_id: InvocationId::new(invocation),
        attempt: 0,
        node_id: NodeId::new("n1"),
        provider: ProviderName::new("a"),
        epoch: EPOCH,
        written_at: tokio::time::Instant::now(),
    }
}

#[tokio::test]
async fn a_late_record_of_a_frame_finds_an_outcome_or_a_deleted_agent() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.agent(1, "handler").await;
    db.locate(1, "n1", Some("a")).await;
    for invocation in 101..=103 {
        db.handled(invocation, 1, "a").await;
    }
    db.run("UPDATE invocations SET node_id = NULL, provider = NULL, sent_epoch = NULL, sent_at = NULL").await;
    let done = db.store.record_outcomes(&[outcome_of(101, Ok(Value::Null))], db.now).await.unwrap();
    assert_eq!(ended(&done), [(101, None)]);
    let placed = "SELECT count(*) FROM invocations
                     WHERE invocation_id = 101 AND (node_id, provider) = ('n1', 'a') AND dispatched_at = created_at";
    assert_eq!(db.number(placed).await, 1, "the outcome names the node before the record does");

    // As the deletion of the handling agent leaves it.
    db.run("UPDATE invocations SET unreachable_since = '-infinity' WHERE invocation_id = 102").await;
    db.store.mark_invocations_sent(&[101, 102, 103].map(frame_of)).await.unwrap();
    let sent = "SELECT sum(invocation_id)::bigint FROM invocations WHERE sent_epoch IS NOT NULL";
    assert_eq!(db.number(sent).await, 103);
    let done = db.store.fail_unservable(ALL, db.now).await.unwrap();
    assert_eq!(ended(&done), [(102, Some("handler_unavailable"))]);
}

#[tokio::test]
async fn an_invocation_that_ends_before_it_began_took_no_time() {
    let db = Database::fresh().await;
    db.hosts(&["n1"]).await;
    db.spawn(101, "n1").await;
    db.spawn(102, "n1").await;
    // Of two clocks one is behind.
    db.run("UPDATE invocations SET sent_at = now() + interval '1 hour'").await;
    let outcome = outcome_of(101, Ok(Value::Null));
    assert_eq!(ended(&db.store.record_outcomes(&[outcome], db.now).await.unwrap()), [(101, None)]);
    db.run("UPDATE invocations SET came_up = '{}', came_up_at = now() - interval '1 hour' WHERE invocation_id = 102")
        .await;
    let done = db.store.finish_spawned(Duration::from_secs(2), ALL, db.now).await.unwrap();
    assert_eq!(ended(&done), [(102, None)]);
    assert_eq!(db.number("SELECT count(*) FROM invocations WHERE duration_ms = 0").await, 2);
}

#[tokio::test]
async fn an_agent_of_no_particular_provider_is_asked_through_one_of_its_node() {
    let db = Database::fresh().await;
    db.agent(1, "bound_by_rest").await;
    db.locate(1, "n1", None).await;
    db.provider("n1", "first", 5, 0).await;
    db.provider("n1", "second", 6, 0).await;
    db.run("UPDATE providers SET registered_at = now() - interval '1 minute' WHERE provider = 'first'").await;
    db.handled(101, 1, "first").await;
    db.run("UPDATE invocations SET sent_epoch = NULL, sent_at = NULL, node_id = NULL, provider = NULL").await;
    let unsent = async |gateway| db.store.unsent_invocations(GatewayId::new(gateway)).await.unwrap().len();
    assert_eq!((unsent(5).await, unsent(6).await), (1, 0));
    db.run("UPDATE providers SET gateway_id = NULL WHERE provider = 'first'").await;
    assert_eq!((unsent(5).await, unsent(6).await), (0, 1));

    // Written to one of them, and again over its next connection, not over the other's.
    db.run("UPDATE providers SET gateway_id = 5, epoch = 4; UPDATE invocations SET sent_epoch = 3, node_id = 'n1', provider = 'first'").await;
    let again = async || {
        let fences = ["first", "second"].map(|provider| Fence { epoch: 4, ..fence("n1", provider) });
        let frames = db.store.invocations_of_earlier_epochs(&fences).await.unwrap();
        frames.into_iter().map(|frame| frame.provider.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(again().await, ["first"]);
    // One that goes may come back; when it stays unavailable, the other one is asked, which need not connect again.
    db.run("UPDATE providers SET gateway_id = NULL, last_heartbeat_at = now() WHERE provider = 'first'").await;
    db.store.reclaim_lost_invocations(ALL, db.now + TimeDelta::seconds(40)).await.unwrap();
    assert_eq!(unsent(5).await, 0);
    db.store.reclaim_lost_invocations(ALL, db.now + TimeDelta::seconds(50)).await.unwrap();
    assert_eq!(unsent(5).await, 1);

    db.run("UPDATE invocations SET sent_epoch = 3; DELETE FROM providers WHERE provider = 'first'").await;
    assert_eq!(again().await, ["second"], "the one that was asked is gone");
}
