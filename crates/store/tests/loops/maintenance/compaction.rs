use crate::fixture::Database;

#[tokio::test]
async fn settlements_below_the_ack_floor_are_removed_but_dead_letters_stay() {
    let db = Database::fresh().await;
    for agent in 1..=3 {
        db.agent(agent, &format!("a{agent}")).await;
        db.ack_floor(agent, 4).await;
        for (seq, state) in [(1, 1), (2, 2), (3, 3), (4, 4), (6, 1)] {
            db.settlement(agent, seq, state).await;
        }
    }
    let mut removed = 0;
    let mut steps = 0;
    loop {
        let done = db.store.compact_settlements(4).await.unwrap();
        removed += done.removed;
        steps += 1;
        if !done.more {
            break;
        }
    }
    assert_eq!((removed, steps), (9, 4), "15 rows in pages of 4");
    for agent in 1..=3 {
        assert_eq!(db.settlements(agent).await, [(4, 4), (6, 1)]);
    }
    assert_eq!(db.store.compact_settlements(100).await.unwrap().removed, 0);
}

#[tokio::test]
async fn a_settled_floor_left_behind_by_a_race_is_moved_on() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    db.ack_floor(1, 4).await;
    for (seq, state) in [(5, 4), (6, 1), (7, 3), (8, 4)] {
        db.settlement(1, seq, state).await;
    }
    assert_eq!(db.store.compact_settlements(100).await.unwrap().extended, 1);
    assert_eq!(db.settled_floor(1).await, 6, "a deferred row stops it");
}
