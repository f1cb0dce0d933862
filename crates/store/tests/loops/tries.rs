//! The rows of tries are the same however many are written at once.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{DeliveryId, NodeId};
use relay_store::{
    push_mailboxes::TakenMailbox,
    push_record::{Attempt, Outcome, Tried},
};

use crate::fixture::Database;

const AGENT: i64 = 1;
const OWNER: i64 = 5;

/// A try of every sort: answered and not, with text and bytes of all kinds.
pub(crate) fn tried(seq: i64, first_id: i64, at: DateTime<Utc>) -> Tried {
    let (scope, agent_id) = Database::mailbox(AGENT);
    let (status, answer, error) = match seq % 3 {
        0 => (Some(204), None, None),
        1 => (Some(500), Some(vec![0, 255, b'\\', b'\n', b'x']), Some("HTTP 500 – größer\t\\N".to_owned())),
        _ => (None, None, Some("no connection".to_owned())),
    };
    Tried {
        mailbox: TakenMailbox {
            scope,
            agent_id,
            node_id: NodeId::new("hook"),
            agent_name: "ada".to_owned(),
            epoch: 1,
            pushed_seq: 0,
        },
        delivery_id: DeliveryId { source: seq, agent: agent_id, redrive_no: 0 },
        seq,
        place: None,
        attempt: Attempt {
            id: first_id + seq,
            // Rows of a batch may be of two days.
            at: at - TimeDelta::hours(if seq > 20 { 24 } else { 0 }) + TimeDelta::nanoseconds(seq * 1_000_999),
            latency_ms: i32::try_from(seq).unwrap(),
            status,
            answer,
            error,
        },
        outcome: Outcome::Acked,
        pushed_seq: None,
        sender: None,
        events: Vec::new(),
    }
}

type Row = (i64, String, String, DateTime<Utc>, i32, Option<i16>, Option<Vec<u8>>, Option<String>);

async fn rows(db: &Database, ids: std::ops::Range<i64>) -> Vec<Row> {
    sqlx::query_as(
        "SELECT seq, created_on::text, node_id, attempted_at, latency_ms, status, answer, error
           FROM delivery_attempts WHERE workspace_id = 7 AND agent_id = 1 AND attempt_id >= $1 AND attempt_id < $2
          ORDER BY seq",
    )
    .bind(ids.start)
    .bind(ids.end)
    .fetch_all(&db.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn many_tries_leave_the_rows_that_single_ones_leave() {
    let db = Database::fresh().await;
    db.agent(AGENT, "ada").await;
    // Out of order, as tries end.
    let order = (1..=40).map(|n| n * 7 % 41);
    let (single, many): (Vec<_>, Vec<_>) =
        order.map(|seq| (tried(seq, 1000, db.now), tried(seq, 2000, db.now))).unzip();
    for one in &single {
        db.store.record_tries(OWNER, std::slice::from_ref(one), false, db.now).await.unwrap();
    }
    db.store.record_tries(OWNER, &many, false, db.now).await.unwrap();
    let (alone, together) = (rows(&db, 1000..2000).await, rows(&db, 2000..3000).await);
    assert_eq!(alone.len(), 40);
    assert_eq!(together, alone);
    let days: std::collections::BTreeSet<&str> = together.iter().map(|row| row.1.as_str()).collect();
    assert_eq!(days.len(), 2, "{days:?}");

    // A transaction whose outcome nobody knows is written again, with others.
    let mut again = many;
    again.push(tried(41, 2000, db.now));
    db.store.record_tries(OWNER, &again, true, db.now).await.unwrap();
    assert_eq!(rows(&db, 2000..3000).await.len(), 41);

    // What is told as new and is there is refused as a whole, and the connection is of use afterwards.
    again.push(tried(42, 2000, db.now));
    db.store.record_tries(OWNER, &again, false, db.now).await.unwrap_err();
    assert_eq!(rows(&db, 2000..3000).await.len(), 41);
    db.store.record_tries(OWNER, &again, true, db.now).await.unwrap();
    assert_eq!(rows(&db, 2000..3000).await.len(), 42);
}
