//! Conditions by which idle loops are woken: each holds while its loop would find work.

use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{
    GatewayId, PushWorkerId,
    subscriptions::dispatch::{ClaimedHealth, SubscriptionClaim},
};
use relay_store::{maintenance::due_work::WorkKind, workspaces::suspensions::SuspensionRows};

use crate::fixture::{Database, WORKSPACE};

const MINUTE: Duration = Duration::from_secs(60);

/// Rows of the tables that a kind of work is found in.
struct Case {
    kind: WorkKind,
    /// Rows that are no work.
    idle: &'static str,
    /// Makes some of them work.
    due: &'static str,
    /// Other kinds that the same rows are work of.
    also: &'static [WorkKind],
    /// Ends the work.
    done: &'static str,
}

const CASES: &[Case] = &[
    Case {
        kind: WorkKind::UnpublishedBatches,
        idle: "INSERT INTO outbox (batch_id, gateway_id, sources, published_at) VALUES (1, 5, '[]', now())",
        due: "INSERT INTO outbox (batch_id, gateway_id, sources) VALUES (2, 5, '[]')",
        also: &[],
        done: "UPDATE outbox SET published_at = now()",
    },
    Case {
        kind: WorkKind::OpenInvocations,
        idle: "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input,
                                        output, status, due_at, created_at, completed_at)
               VALUES (7, 1, 'a', 'a', 'x', '{}', '{}', 'completed', now(), now(), now())",
        due:
            "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, status,
                                       due_at, created_at)
              VALUES (7, 2, 'a', 'a', 'x', '{}', 'pending', now() + interval '1 hour', now())",
        also: &[],
        done: "UPDATE invocations SET status = 'completed', output = '{}', completed_at = now()",
    },
    Case {
        kind: WorkKind::OrphanedProviders,
        idle: "INSERT INTO gateways (gateway_id, lease_until)
               VALUES (5, now() + interval '1 minute'), (6, now() - interval '2 seconds'),
                      (9, now() + interval '1 minute');
               INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, registered_at,
                                      last_heartbeat_at)
               VALUES (7, 'n1', 'a', 'i', 1, 5, now(), now()), (7, 'n2', 'a', 'i', 1, 6, now(), now()),
                      (7, 'n3', 'a', 'i', 1, NULL, now(), now()), (7, 'n4', 'a', 'i', 1, 9, now(), now())",
        due: "UPDATE gateways SET lease_until = now() - interval '6 seconds' WHERE gateway_id = 6",
        also: &[],
        done: "UPDATE providers SET gateway_id = NULL WHERE gateway_id = 6",
    },
    Case {
        // The lease of a gateway that has ended in order has no row.
        kind: WorkKind::OrphanedProviders,
        idle: "SELECT",
        due: "DELETE FROM gateways WHERE gateway_id = 9",
        also: &[],
        done: "UPDATE providers SET gateway_id = NULL",
    },
    Case {
        kind: WorkKind::UnsentInvocations,
        idle: "UPDATE agents SET node_id = 'n1';
               UPDATE providers SET gateway_id = 5 WHERE node_id = 'n1';
               INSERT INTO invocations (workspace_id, invocation_id, action_name, handler_agent_id, caller_name, input,
                                        output, status, due_at, created_at, completed_at)
               VALUES (7, 3, 'a', 99, 'x', '{}', '{}', 'completed', now(), now(), now())",
        due: "UPDATE invocations SET status = 'invoked', output = NULL, completed_at = NULL WHERE invocation_id = 3",
        also: &[WorkKind::OpenInvocations],
        done: "UPDATE invocations SET status = 'completed', output = '{}', completed_at = now()",
    },
    Case {
        kind: WorkKind::OpenSubscriptions,
        idle: "INSERT INTO event_heads (workspace_id, next_seq) VALUES (7, 3)
                   ON CONFLICT (workspace_id) DO UPDATE SET next_seq = 3;
               INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at, event_cursor,
                                          is_active, disabled_at)
               VALUES (7, 1, '{*}', 'https://127.0.0.1:9', now(), 2, true, NULL),
                      (7, 2, '{*}', 'https://127.0.0.1:9', now(), 0, false, now())",
        due: "UPDATE event_heads SET next_seq = 4",
        also: &[],
        done: "UPDATE subscriptions SET event_cursor = 3",
    },
    Case {
        kind: WorkKind::DueRedrives,
        idle: "INSERT INTO redrives (workspace_id, redrive_id, filter, from_at, until_at, rate, matched, created_at,
                                     next_at, finished_at)
               VALUES (7, 1, '{}', now(), now(), 1, 1, now(), NULL, now()),
                      (7, 2, '{}', now(), now(), 1, 1, now(), now() + interval '1 minute', NULL)",
        due: "UPDATE redrives SET next_at = now() WHERE redrive_id = 2",
        also: &[],
        done: "UPDATE redrives SET next_at = NULL, finished_at = now()",
    },
    Case {
        kind: WorkKind::UnscannedTriggers,
        idle: "UPDATE event_heads SET next_seq = 4;
               INSERT INTO trigger_progress (workspace_id, reached_seq) VALUES (7, 3)",
        due: "UPDATE trigger_progress SET reached_seq = 2",
        also: &[],
        done: "UPDATE trigger_progress SET claimed_until = now() + interval '1 minute'",
    },
    Case {
        kind: WorkKind::EndedSessions,
        idle: "SELECT",
        due: "UPDATE agents SET mailbox_orphaned = true",
        also: &[],
        done: "UPDATE agents SET mailbox_orphaned = false",
    },
    Case {
        kind: WorkKind::EndedSessions,
        idle: "SELECT",
        due: "INSERT INTO agent_releases (workspace_id, invocation_id, agent_id, deletes, created_at)
              VALUES (7, 4, 99, true, now() - interval '2 minutes')",
        also: &[],
        done: "DELETE FROM agent_releases",
    },
    Case {
        kind: WorkKind::LapsedFanouts,
        idle: "INSERT INTO gateways (gateway_id, lease_until) VALUES (9, now() + interval '1 minute');
               INSERT INTO fanouts (workspace_id, message_id, agents, modes, reasons, sender_id, channel_id, created_on,
                                    created_at, expires_at, gateway_id, claimed_until)
               VALUES (7, 1, '{99}', '{0}', '{0}', 99, 1, current_date, now(), now(), 9, now() + interval '1 minute'),
                      (7, 2, '{99}', '{0}', '{0}', 99, 1, current_date, now(), now(), 0, now() + interval '1 minute')",
        due: "DELETE FROM gateways WHERE gateway_id = 9",
        also: &[],
        done: "DELETE FROM fanouts",
    },
    Case {
        kind: WorkKind::Suspensions,
        idle: "UPDATE workspaces SET suspended_at = now(), deleted_at = now();
               INSERT INTO nodes (workspace_id, node_id, name, created_at, draining_at, drained_at)
               VALUES (7, 'n1', 'n1', now(), now(), now() + interval '1 minute')",
        due: "UPDATE workspaces SET deleted_at = NULL",
        also: &[],
        done: "UPDATE workspaces SET suspended_at = NULL",
    },
    Case {
        kind: WorkKind::Suspensions,
        idle: "SELECT",
        due: "UPDATE nodes SET drained_at = now()",
        also: &[],
        done: "UPDATE nodes SET draining_at = NULL, drained_at = NULL",
    },
    Case {
        kind: WorkKind::SweptPushMailboxes,
        idle: "SELECT",
        due: "UPDATE nodes SET kind = 'http_push'",
        also: &[],
        done: "UPDATE nodes SET kind = 'ws'",
    },
    Case {
        kind: WorkKind::SweptPushMailboxes,
        idle: "INSERT INTO push_workers (owner, lease_until) VALUES (1, now() - interval '9 minutes')",
        due: "UPDATE push_workers SET lease_until = now() - interval '11 minutes'",
        also: &[],
        done: "DELETE FROM push_workers",
    },
];

const ALL: [WorkKind; 13] = [
    WorkKind::UnpublishedBatches,
    WorkKind::OpenInvocations,
    WorkKind::UnsentInvocations,
    WorkKind::OrphanedProviders,
    WorkKind::OpenSubscriptions,
    WorkKind::DueRedrives,
    WorkKind::DuePushMailboxes,
    WorkKind::SweptPushMailboxes,
    WorkKind::UnscannedTriggers,
    WorkKind::EndedSessions,
    WorkKind::UnfoldedAcks,
    WorkKind::LapsedFanouts,
    WorkKind::Suspensions,
];

impl Database {
    /// A database with a workspace, and nothing to do.
    async fn idle() -> Self {
        let db = Self::fresh().await;
        db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())"))
            .await;
        assert_eq!(db.due().await, [WorkKind::UnfoldedAcks], "the first step");
        db.store.fold_read_pointers(100, db.now).await.unwrap();
        db
    }

    async fn due(&self) -> Vec<WorkKind> {
        self.store.due_work(&ALL).await.unwrap()
    }

    /// Returns whether the statement of a kind's loop finds work. `None` for those that other tests call, and for the
    /// sweep, whose condition is wider.
    async fn finds_work(&self, kind: WorkKind) -> Option<bool> {
        let store = &self.store;
        let is_empty = match kind {
            WorkKind::UnpublishedBatches => store.claim_unpublished(MINUTE, 10, MINUTE).await.unwrap().is_empty(),
            WorkKind::OpenInvocations => {
                store.workspaces_with_due_invocations(self.now + TimeDelta::hours(2)).await.unwrap().is_empty()
            }
            WorkKind::UnsentInvocations => store.unsent_invocations(GatewayId::new(5)).await.unwrap().is_empty(),
            WorkKind::OrphanedProviders => {
                store.disconnect_orphaned_providers(10, self.now).await.unwrap().providers.is_empty()
            }
            WorkKind::OpenSubscriptions => {
                let health = ClaimedHealth::Healthy;
                let claim =
                    SubscriptionClaim { owner: "w", health, failing_from: 5, limit: 10, per_family: 10, lease: MINUTE };
                store.claim_subscriptions(claim).await.unwrap().leased.is_empty()
            }
            WorkKind::DueRedrives => store.redrive_step(TimeDelta::seconds(1), self.now).await.unwrap().is_none(),
            WorkKind::UnscannedTriggers => store.claim_trigger_scans(10, 10, 60).await.unwrap().is_empty(),
            WorkKind::EndedSessions => {
                let mailboxes = store.orphaned_mailboxes(10).await.unwrap();
                mailboxes.is_empty() && store.settled_releases(10).await.unwrap().is_empty()
            }
            WorkKind::LapsedFanouts => store.claim_lapsed_fanout(GatewayId::new(0)).await.unwrap().is_none(),
            WorkKind::Suspensions => store.suspensions().await.unwrap() == SuspensionRows::default(),
            WorkKind::DuePushMailboxes | WorkKind::UnfoldedAcks | WorkKind::SweptPushMailboxes => return None,
        };
        Some(!is_empty)
    }
}

#[tokio::test]
async fn work_is_due_while_there_are_rows_for_it() {
    let db = Database::idle().await;
    assert_eq!(db.due().await, []);
    for Case { kind, idle, due, also, done } in CASES {
        db.run(idle).await;
        assert_eq!(db.due().await, [], "{kind:?} is not due yet");
        assert_ne!(db.finds_work(*kind).await, Some(true), "{kind:?} is not due yet");
        db.run(due).await;
        let found = db.due().await;
        let expected = |found: &&WorkKind| *found == kind || also.contains(found);
        assert!(found.contains(kind) && found.iter().filter(expected).count() == found.len(), "{kind:?}: {found:?}");
        assert_ne!(db.finds_work(*kind).await, Some(false), "{kind:?} is due");
        db.run(done).await;
        assert_eq!(db.due().await, [], "{kind:?} is done");
        assert_ne!(db.finds_work(*kind).await, Some(true), "{kind:?} is done");
    }
}

#[tokio::test]
async fn only_the_kinds_that_are_asked_for_are_read() {
    let db = Database::idle().await;
    db.run("INSERT INTO outbox (batch_id, gateway_id, sources) VALUES (2, 5, '[]')").await;
    let due = db.store.due_work(&[WorkKind::DueRedrives, WorkKind::UnpublishedBatches]).await.unwrap();
    assert_eq!(due, [WorkKind::UnpublishedBatches]);
    assert_eq!(db.store.due_work(&[WorkKind::DueRedrives]).await.unwrap(), []);
}

#[tokio::test]
async fn a_push_mailbox_is_due_as_long_as_it_can_be_claimed() {
    let db = Database::idle().await;
    db.agent(1, "ada").await;
    db.run(&format!(
        "UPDATE agents SET node_id = 'n' WHERE agent_id = 1;
         INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, due_at)
         VALUES ({WORKSPACE}, 1, 'n', now() + interval '1 minute')"
    ))
    .await;
    assert_eq!(db.due().await, [WorkKind::SweptPushMailboxes]);
    for (change, is_due) in [
        ("UPDATE push_mailboxes SET due_at = now()", true),
        ("UPDATE workspaces SET suspended_at = now()", false),
        ("UPDATE workspaces SET suspended_at = NULL", true),
        ("UPDATE push_mailboxes SET disabled_at = now(), disabled_reason = 'gone'", false),
        ("UPDATE push_mailboxes SET disabled_at = NULL, disabled_reason = NULL", true),
    ] {
        db.run(change).await;
        assert_eq!(db.due().await.contains(&WorkKind::DuePushMailboxes), is_due, "{change}");
    }
    let worker = PushWorkerId::new(7);
    db.store.renew_push_worker(worker, MINUTE).await.unwrap();
    assert_eq!(db.store.claim_due_mailboxes(worker, 10).await.unwrap().len(), 1);
    assert_eq!(db.due().await, [WorkKind::SweptPushMailboxes]);
}

#[tokio::test]
async fn acks_are_due_until_they_are_folded() {
    let db = Database::idle().await;
    db.agent(1, "ada").await;
    db.agent(2, "bob").await;
    db.deliveries(1, &[3600, 3600]).await;
    // An hour later a walk begins; it takes two steps.
    let later = db.now + TimeDelta::hours(1);
    db.store.fold_read_pointers(2, later).await.unwrap();
    assert_eq!(db.due().await, [WorkKind::UnfoldedAcks], "a walk is under way");
    db.store.fold_read_pointers(2, later).await.unwrap();
    assert_eq!(db.due().await, []);

    // The record of an open transaction is new once it commits, however many steps there were meanwhile.
    let mut ack = db.pool.begin().await.unwrap();
    sqlx::raw_sql(
        "UPDATE mailbox_cursors SET sent_seq = 1, ack_floor = 1, settled_floor = 1 WHERE agent_id = 1;
         INSERT INTO ack_log (workspace_id, agent_id, ack_floor, acked_at, created_on)
         VALUES (7, 1, 1, now(), (now() AT TIME ZONE 'UTC')::date)",
    )
    .execute(&mut *ack)
    .await
    .unwrap();
    db.store.fold_read_pointers(2, later).await.unwrap();
    assert_eq!(db.due().await, []);
    ack.commit().await.unwrap();
    assert_eq!(db.due().await, [WorkKind::UnfoldedAcks]);
    db.store.fold_read_pointers(2, later).await.unwrap();
    assert_eq!(db.due().await, []);

    db.run("UPDATE recovery_state SET epoch = epoch + 1").await;
    assert_eq!(db.due().await, [WorkKind::UnfoldedAcks], "positions of before a recovery count no more");
}

#[tokio::test]
async fn a_lapsed_fanout_is_due_until_it_is_claimed() {
    let db = Database::idle().await;
    db.run(
        "INSERT INTO fanouts (workspace_id, message_id, agents, modes, reasons, sender_id, channel_id, created_on,
                              created_at, expires_at, gateway_id, claimed_until)
         VALUES (7, 1, '{99}', '{0}', '{0}', 99, 1, current_date, now(), now(), 0, now() - interval '1 second')",
    )
    .await;
    assert_eq!(db.due().await, [WorkKind::LapsedFanouts]);
    assert!(db.store.claim_lapsed_fanout(GatewayId::new(0)).await.unwrap().is_some());
    assert_eq!(db.due().await, []);
}

#[tokio::test]
async fn a_renewed_worker_is_listed_with_the_live_ones() {
    let db = Database::idle().await;
    db.run(
        "INSERT INTO push_workers (owner, lease_until)
         VALUES (1, now() - interval '1 second'), (2, now() + interval '1 minute')",
    )
    .await;
    let renew = async |owner| {
        let live = db.store.renew_push_worker(PushWorkerId::new(owner), MINUTE).await.unwrap();
        live.into_iter().map(PushWorkerId::get).collect::<Vec<_>>()
    };
    assert_eq!(renew(3).await, [2, 3]);
    assert_eq!(renew(1).await, [1, 2, 3]);
    assert_eq!(renew(3).await, [1, 2, 3]);
}
