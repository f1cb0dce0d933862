//! Fan-outs: recipients are fixed by the transaction that accepts the message, and get it once each.

use relay_domain::{BatchId, GatewayId, MessageId};
use relay_store::messages::{
    batch::{NewSend, SendOutcome},
    fanout_chunks::{ChunkOutcome, FanoutChunk, WrittenChunk},
};

use crate::{
    commits::{batch, create_room, send_to},
    fixture::Database,
};

const MEMBERS: i64 = 1100;
const GATEWAY: GatewayId = GatewayId::new(1);

/// Fan-out to all members of a room.
pub(crate) async fn open(db: &Database) -> NewSend {
    create_room(db, MEMBERS).await;
    let send = send_to(db, 5, 1000..1000 + MEMBERS);
    let outcome = db.store.commit_batch(&batch(10, vec![send.clone()])).await.unwrap();
    let [SendOutcome::FanoutOpened { .. }] = &outcome.sends[..] else { panic!("{:?}", outcome.sends) };
    send
}

pub(crate) async fn write(db: &Database, send: &NewSend, written: i32, batch: i64) -> Option<WrittenChunk> {
    let (scope, message) = (send.scope, &send.message);
    let batch_id = BatchId::new(batch);
    let chunk = FanoutChunk { scope, message, written, batch_id, gateway_id: GATEWAY, at: db.now };
    match db.store.write_fanout_chunk(&chunk).await.unwrap() {
        ChunkOutcome::Written(chunk) => Some(chunk),
        ChunkOutcome::Overtaken => None,
    }
}

async fn write_rest(db: &Database, send: &NewSend, mut written: i32) {
    for batch in 100.. {
        let chunk = write(db, send, written, batch).await.unwrap();
        if chunk.is_last {
            return;
        }
        written = chunk.written;
    }
}

/// Mailboxes with this number of deliveries of the message.
async fn mailboxes_with(db: &Database, deliveries: i64) -> i64 {
    db.number(&format!(
        "SELECT count(*) FROM mailbox_heads h WHERE agent_id >= 1000 AND next_seq = {deliveries} + 1
            AND (SELECT count(*) FROM deliveries d WHERE d.agent_id = h.agent_id AND source_id = 5) = {deliveries}"
    ))
    .await
}

#[tokio::test]
async fn two_writers_of_a_fan_out_write_each_chunk_once() {
    let db = Database::fresh().await;
    let send = open(&db).await;
    assert_eq!(mailboxes_with(&db, 1).await, 0, "the first transaction writes no delivery");
    let (mut written, mut chunks) = (0, 0);
    loop {
        let (one, other) =
            tokio::join!(write(&db, &send, written, 20 + 2 * chunks), write(&db, &send, written, 21 + 2 * chunks));
        assert!(one.is_none() || other.is_none(), "both wrote the chunk after {written}");
        let chunk = one.or(other).unwrap();
        chunks += 1;
        written = chunk.written;
        if chunk.is_last {
            break;
        }
    }
    assert_eq!((chunks, mailboxes_with(&db, 1).await), (3, MEMBERS));
    assert!(write(&db, &send, written, 90).await.is_none(), "it is complete");
    assert_eq!(db.number("SELECT count(*) FROM fanouts").await, 0);
    let unpublished =
        db.number("SELECT sum(last_agent - first_agent + 1)::bigint FROM outbox WHERE first_agent > 0").await;
    assert_eq!(unpublished, MEMBERS, "each chunk is published by itself");
}

#[tokio::test]
async fn recipients_are_those_with_room_when_the_message_was_accepted_and_still_there_at_their_chunk() {
    let db = Database::fresh().await;
    create_room(&db, MEMBERS).await;
    db.run("UPDATE mailbox_heads SET next_seq = 1 + (SELECT mailbox_depth FROM workspaces) WHERE agent_id = 1003")
        .await;
    let send = send_to(&db, 5, (1000..1000 + MEMBERS).rev());
    let outcome = db.store.commit_batch(&batch(10, vec![send.clone()])).await.unwrap();
    let [SendOutcome::FanoutOpened { full }] = &outcome.sends[..] else { panic!("{:?}", outcome.sends) };
    let full: Vec<i64> = full.iter().map(|position| send.recipients[*position].agent_id.get()).collect();
    assert_eq!(full, [1003]);
    // Since then one mailbox has become full, and an agent was deleted.
    db.run(
        "UPDATE mailbox_heads SET next_seq = 1 + (SELECT mailbox_depth FROM workspaces) WHERE agent_id = 1004;
         UPDATE agents SET deleted_at = now() WHERE agent_id = 1005",
    )
    .await;
    write_rest(&db, &send, 0).await;
    let delivered = |agent: i64| format!("SELECT count(*) FROM deliveries WHERE agent_id = {agent} AND source_id = 5");
    for (agent, deliveries) in [(1003, 0), (1004, 1), (1005, 0), (1006, 1)] {
        assert_eq!(db.number(&delivered(agent)).await, deliveries, "{agent}");
    }
    let again = db.store.commit_batch(&batch(10, vec![send])).await.unwrap();
    let [SendOutcome::FanoutOpened { full }] = &again.sends[..] else { panic!("{:?}", again.sends) };
    assert_eq!(full.len(), 2, "a batch that is submitted again finds those that got none");
}

#[tokio::test]
async fn a_later_send_of_the_author_waits_for_the_fan_out_and_others_do_not() {
    let db = Database::fresh().await;
    let send = open(&db).await;
    db.agent(98, "other").await;
    let commit = async |id: i64, arrived: i64, author: i64| {
        let mut send = send_to(&db, id, 1001..1002);
        send.arrived = MessageId::new(arrived);
        send.message.agent_id = relay_domain::AgentId::new(author);
        let outcome = db.store.commit_batch(&batch(id, vec![send])).await.unwrap();
        outcome.sends.into_iter().next().unwrap()
    };
    let sender = send.message.agent_id.get();
    let outcome = commit(50, 6, sender).await;
    assert!(matches!(outcome, SendOutcome::SenderBusy), "{outcome:?}");
    let outcome = commit(51, 5, sender).await;
    assert!(matches!(outcome, SendOutcome::Committed(_)), "it arrived before: {outcome:?}");
    let outcome = commit(52, 6, 98).await;
    assert!(matches!(outcome, SendOutcome::Committed(_)), "another author: {outcome:?}");
    assert!(db.store.has_open_fanout(send.scope, send.message.agent_id, MessageId::new(6)).await.unwrap());
    write_rest(&db, &send, 0).await;
    assert!(!db.store.has_open_fanout(send.scope, send.message.agent_id, MessageId::new(6)).await.unwrap());
    let outcome = commit(53, 6, sender).await;
    assert!(matches!(outcome, SendOutcome::Committed(_)), "{outcome:?}");
}

#[tokio::test]
async fn another_process_continues_without_a_lease_or_after_the_claim() {
    let db = Database::fresh().await;
    let send = open(&db).await;
    db.run("INSERT INTO gateways (gateway_id, lease_until) VALUES (1, now() + interval '1 minute')").await;
    let chunk = write(&db, &send, 0, 20).await.unwrap();
    let other = GatewayId::new(0);
    assert_eq!(db.store.claim_lapsed_fanout(other).await.unwrap(), None, "its gateway has a lease");
    db.run("UPDATE gateways SET lease_until = now() - interval '1 second'").await;
    let claimed = db.store.claim_lapsed_fanout(other).await.unwrap().unwrap();
    assert_eq!((claimed.message_id, claimed.written), (send.message.id, chunk.written));
    assert!(!claimed.is_outdated);
    assert_eq!(db.store.claim_lapsed_fanout(other).await.unwrap(), None, "claimed is claimed");
    db.advance(6).await;
    assert!(db.store.claim_lapsed_fanout(other).await.unwrap().is_some(), "a lapsed claim is taken again");
    db.advance(10 * 86_400).await;
    assert!(db.store.claim_lapsed_fanout(other).await.unwrap().unwrap().is_outdated);
    db.store.abandon_fanout(send.scope, send.message.id).await.unwrap();
    assert_eq!(db.number("SELECT count(*) FROM fanouts").await, 0);
}

#[tokio::test]
async fn deliveries_that_a_recovery_restored_are_not_repeated() {
    let db = Database::fresh().await;
    let send = open(&db).await;
    db.run(
        "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at, expires_at)
         SELECT workspace_id, 1002, 1, created_on, message_id, 'n', created_at, expires_at FROM fanouts;
         UPDATE mailbox_heads SET next_seq = 2 WHERE agent_id = 1002",
    )
    .await;
    write_rest(&db, &send, 0).await;
    assert_eq!(mailboxes_with(&db, 1).await, MEMBERS);
}
