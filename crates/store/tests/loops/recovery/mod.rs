//! Recovery of a restored database: seqs that a jump of the head skips; the epoch and the lock of repairers are in the
//! submodules.

mod epoch;
mod repairers;

use relay_domain::{
    DeliveryId, NodeId, ProviderName, PushWorkerId, SourceId, mailboxes::DeliveryReport, push::attempt::RecordingPass,
};
use relay_store::{
    mailboxes::{
        cursors::{CursorMove, LockedCursors},
        expiry::ExpiryPass,
        redrives::RedriveOutcome,
    },
    recovery::BEFORE_ALL_MAILBOXES,
};

use crate::{
    fixture::{Database, SENDER, WORKSPACE},
    push::{no_events, push_attempt},
};

const ADA: i64 = 1;
const BOB: i64 = 2;
const CYD: i64 = 3;

impl Database {
    /// Jumps all mailboxes, two per step. Returns the counts of mailboxes and lost seqs.
    async fn jump(&self, margin: i64) -> (u64, u64) {
        let (mut after, mut mailboxes, mut lost, mut id) = (BEFORE_ALL_MAILBOXES, 0, 0, 1000);
        loop {
            let fresh_id = || {
                id += 1;
                id
            };
            let step = self.store.jump_heads(after, 2, margin, self.now, fresh_id).await.unwrap();
            mailboxes += step.mailboxes;
            lost += step.lost;
            let Some(last) = step.last else { return (mailboxes, lost) };
            after = last;
        }
    }

    async fn head(&self, agent: i64) -> i64 {
        self.number(&format!("SELECT next_seq FROM mailbox_heads WHERE agent_id = {agent}")).await
    }

    async fn skipped(&self, agent: i64) -> Vec<(i64, i64)> {
        sqlx::query_as("SELECT first_seq, last_seq FROM skipped_seqs WHERE agent_id = $1 ORDER BY last_seq")
            .bind(agent)
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// An ack over the socket of the agent's direct node.
    async fn acks(&self, agent: i64, acked_seq: i64) {
        let (scope, agent_id) = Self::mailbox(agent);
        let (node_id, provider) = (NodeId::direct(agent_id), ProviderName::new("default"));
        let ack = CursorMove { scope, agent_id, node_id, provider, sent_seq: acked_seq, acked_seq, epoch: None };
        self.store.flush_cursors(&[ack], LockedCursors::Wait, self.now).await.unwrap();
    }

    /// One more delivery, of the message that `deliveries` wrote as the first.
    async fn one_more(&self, agent: i64, seq: i64) {
        self.run(&format!(
            "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, redrive_no, node_id, created_at,
                                     expires_at)
             SELECT workspace_id, agent_id, {seq}, created_on, source_id, 1, node_id, created_at, expires_at
               FROM deliveries WHERE agent_id = {agent} AND seq = 1;
             UPDATE mailbox_heads SET next_seq = {seq} + 1 WHERE agent_id = {agent}"
        ))
        .await;
    }
}

#[tokio::test]
async fn a_jump_costs_one_row_in_each_mailbox_that_holds_something() {
    let db = Database::fresh().await;
    for (agent, name, lives) in [(ADA, "ada", &[60, 60][..]), (BOB, "bob", &[60][..]), (CYD, "cyd", &[][..])] {
        db.agent(agent, name).await;
        db.deliveries(agent, lives).await;
    }
    assert_eq!(db.jump(10_000).await, (4, 0), "the sender has a mailbox too");
    for (agent, next) in [(ADA, 10_003), (BOB, 10_002), (CYD, 10_001), (SENDER, 10_001)] {
        assert_eq!(db.head(agent).await, next);
    }
    assert_eq!(db.number("SELECT count(*) FROM delivery_exceptions").await, 0);
    assert_eq!((db.skipped(ADA).await, db.skipped(BOB).await), (vec![(3, 10_002)], vec![(2, 10_001)]));
    assert_eq!((db.skipped(CYD).await, db.settled_floor(CYD).await), (vec![], 10_000), "nothing waits");

    // Whatever settles what waited, the floor goes on to the head.
    db.acks(ADA, 1).await;
    assert_eq!(db.settled_floor(ADA).await, 1, "one waits");
    db.acks(ADA, 2).await;
    assert_eq!(db.settled_floor(ADA).await, 10_002);
    let (scope, bob) = Database::mailbox(BOB);
    let source = SourceId::new(db.number("SELECT source_id FROM deliveries WHERE agent_id = 2").await);
    let delivery = DeliveryId { source, agent: bob, redrive_no: 0 };
    let acked = db.store.report_delivery(scope, delivery, &DeliveryReport::Ack, db.now, |_| Vec::new()).await.unwrap();
    assert!(acked.flatten().is_some());
    assert_eq!(db.settled_floor(BOB).await, 10_001);
}

#[tokio::test]
async fn a_floor_within_skipped_numbers_is_at_their_end() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.jump(100).await;
    db.one_more(ADA, 102).await;
    // A client acknowledges some of the tombstones.
    db.acks(ADA, 50).await;
    assert_eq!(db.settled_floor(ADA).await, 101);
    assert_eq!(db.store.compact_settlements(10).await.unwrap().removed, 0, "they are above the ack floor");
    db.acks(ADA, 102).await;
    assert_eq!(db.settled_floor(ADA).await, 102);
    assert_eq!(db.store.compact_settlements(10).await.unwrap().removed, 1);
    assert_eq!(db.skipped(ADA).await, []);
}

#[tokio::test]
async fn jumps_after_each_other_make_one_run_and_later_ones_another() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.jump(10).await;
    db.jump(10).await;
    assert_eq!(db.skipped(ADA).await, [(2, 21)], "a recovery was interrupted and begun again");
    db.one_more(ADA, 22).await;
    db.jump(10).await;
    assert_eq!(db.skipped(ADA).await, [(2, 21), (23, 32)]);
    for seq in [1, 22] {
        db.settlement(ADA, seq, 1).await;
    }
    assert_eq!(db.store.compact_settlements(10).await.unwrap().extended, 1);
    assert_eq!(db.settled_floor(ADA).await, 32);
}

#[tokio::test]
async fn a_floor_that_an_older_program_left_below_skipped_numbers_passes_them() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.jump(100).await;
    db.ack_floor(ADA, 1).await;
    assert_eq!(db.store.compact_settlements(10).await.unwrap().extended, 1);
    assert_eq!(db.settled_floor(ADA).await, 101);
    assert_eq!(db.store.compact_settlements(10).await.unwrap().extended, 0);
}

#[tokio::test]
async fn a_jump_leaves_what_an_interrupted_recovery_wrote_again() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60; 5]).await;
    db.run("DELETE FROM deliveries WHERE seq = 4; UPDATE mailbox_heads SET next_seq = 3 WHERE agent_id = 1").await;
    assert_eq!(db.jump(100).await, (2, 1), "of 4 nothing is known");
    assert_eq!((db.head(ADA).await, db.skipped(ADA).await), (106, vec![(6, 105)]));
    assert_eq!(db.settlements(ADA).await, [(4, 4)]);
    assert_eq!(db.settled_floor(ADA).await, 0, "the others wait");
}

#[tokio::test]
async fn skipped_numbers_take_no_room_in_a_mailbox() {
    let db = Database::fresh().await;
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, mailbox_depth, created_at) VALUES ({WORKSPACE}, 'w', 2, now())"
    ))
    .await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-10, -5, 3600]).await;
    db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    db.jump(100).await;
    let (scope, ada) = Database::mailbox(ADA);
    let redriven = async |seq| db.store.redrive_dead_letter(scope, ada, seq, db.now).await.unwrap().0;
    assert_eq!(redriven(1).await, RedriveOutcome::Redriven { seq: 104, redrive_no: 1, now: true });
    assert_eq!(redriven(2).await, RedriveOutcome::MailboxFull);
}

#[tokio::test]
async fn the_ack_floor_of_attempts_passes_skipped_numbers() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.run("UPDATE agents SET node_id = 'hook' WHERE agent_id = 1").await;
    db.deliveries(ADA, &[60]).await;
    db.jump(100).await;
    db.one_more(ADA, 102).await;
    db.store
        .record_attempts(
            PushWorkerId::new(5),
            &[push_attempt(1, 1000, db.now), push_attempt(102, 1000, db.now)],
            no_events,
            RecordingPass::First,
            db.now,
        )
        .await
        .unwrap();
    let floor = db.number("SELECT ack_floor FROM mailbox_cursors WHERE agent_id = 1").await;
    assert_eq!((floor, db.settled_floor(ADA).await, db.settlements(ADA).await), (102, 102, vec![]));
}

#[tokio::test]
async fn a_log_with_numbers_or_mailboxes_that_are_not_there_is_ahead() {
    let db = Database::fresh().await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60; 2]).await;
    let ahead = async |agent, seq, count_missing| {
        let (scope, agent) = Database::mailbox(agent);
        db.store.count_ahead_of_heads(&[(scope, agent, seq)], &[count_missing]).await.unwrap()
    };
    assert_eq!((ahead(ADA, 2, true).await, ahead(ADA, 3, false).await), (0, 1));
    assert_eq!((ahead(55, 1, true).await, ahead(55, 1, false).await), (1, 0), "an agent made later");
    db.run("UPDATE workspaces SET deleted_at = now()").await;
    assert_eq!(ahead(55, 1, true).await, 0, "it may have been erased");
}
