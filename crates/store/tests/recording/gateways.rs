//! Gateways that committed deliveries name: they get the live copies (ADR 0071).

use relay_store::messages::batch::{BatchOutcome, CommitPath, SendOutcome, WrittenDelivery};

use crate::{
    commits::{batch, create_room, send_to},
    fanouts::{open, write},
    fixture::{Database, WORKSPACE},
};

/// Recipients that [`place_recipients`] places, and the gateways of each.
const RECIPIENTS: std::ops::Range<i64> = 1000..1004;
const GATEWAYS: [&[i64]; 4] = [&[1], &[2], &[1, 2], &[]];

/// Places the first four agents of a room: on a direct node, on one provider of a broker, on the broker without an
/// assigned provider, and on an http_push node.
async fn place_recipients(db: &Database) {
    db.run(&format!(
        "INSERT INTO nodes (workspace_id, node_id, name, role, kind, created_at)
         VALUES ({WORKSPACE}, 'box', 'box', 'broker', 'ws', now()),
                ({WORKSPACE}, 'hook', 'hook', 'broker', 'http_push', now());
         INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, gateway_id, registered_at,
                                last_heartbeat_at)
         SELECT {WORKSPACE}, node_id, provider, 'i', 1, gateway_id, now(), now()
           FROM (VALUES ('node_direct_0', 'default', 1), ('box', 'one', 1), ('box', 'two', 2), ('box', 'second', 2),
                        ('box', 'disconnected', NULL)) AS p (node_id, provider, gateway_id);
         UPDATE agents SET node_id = 'box', provider = 'two' WHERE agent_id = 1001;
         UPDATE agents SET node_id = 'box' WHERE agent_id = 1002;
         UPDATE agents SET node_id = 'hook' WHERE agent_id = 1003"
    ))
    .await;
}

/// Returns the gateways of each delivery, in ascending order.
fn gateways<'a>(rows: impl IntoIterator<Item = &'a WrittenDelivery>) -> Vec<Vec<i64>> {
    let sorted = |row: &WrittenDelivery| {
        let mut gateways: Vec<i64> = row.gateways.iter().map(|gateway| gateway.get()).collect();
        gateways.sort_unstable();
        gateways
    };
    rows.into_iter().map(sorted).collect()
}

/// Returns the gateways of each delivery of a batch with one send.
fn gateways_of_send(outcome: &BatchOutcome) -> Vec<Vec<i64>> {
    let [SendOutcome::Committed(rows)] = &outcome.sends[..] else { panic!("{:?}", outcome.sends) };
    gateways(rows.iter().flatten())
}

#[tokio::test]
async fn a_commit_names_the_gateways_with_the_sockets_of_its_recipients() {
    let db = Database::fresh().await;
    create_room(&db, 4).await;
    place_recipients(&db).await;
    let first = batch(10, vec![send_to(&db, 5, RECIPIENTS)]);
    let at_once = db.store.commit_batch(&first).await.unwrap();
    assert_eq!(gateways_of_send(&at_once), GATEWAYS);
    assert_eq!(at_once.path, CommitPath::AtOnce);

    // Submitted again, it is read back.
    let read_back = db.store.commit_batch(&first).await.unwrap();
    assert_eq!(gateways_of_send(&read_back), GATEWAYS);
    assert_eq!((read_back.path, read_back.events.len()), (CommitPath::InSteps, 0));

    // The one statement writes nothing for a watched workspace.
    let (scope, _) = Database::mailbox(1000);
    db.store.watch_events(&[scope], 10).await.unwrap();
    let second = batch(11, vec![send_to(&db, 6, RECIPIENTS)]);
    let in_steps = db.store.commit_batch(&second).await.unwrap();
    assert_eq!(gateways_of_send(&in_steps), GATEWAYS);
    assert_eq!((in_steps.path, in_steps.events.len()), (CommitPath::InSteps, 1));
}

#[tokio::test]
async fn a_chunk_of_a_fan_out_names_the_gateways_with_the_sockets_of_its_recipients() {
    let db = Database::fresh().await;
    let send = open(&db).await;
    place_recipients(&db).await;
    let chunk = write(&db, &send, 0, 20).await.unwrap();
    let mut rows: Vec<_> = chunk.deliveries.iter().map(|(to, row)| (to.agent_id, row)).collect();
    rows.sort_unstable_by_key(|(agent, _)| *agent);
    let (placed, others) = rows.split_at(GATEWAYS.len());
    assert_eq!(gateways(placed.iter().map(|(_, row)| *row)), GATEWAYS);
    // Their nodes have no connected provider.
    assert!(!others.is_empty() && others.iter().all(|(_, row)| row.gateways.is_empty()), "{others:?}");
}
