use crate::Store;

/// A request holds the futures of everything that it may do, and moves them when it starts.
#[tokio::test]
async fn the_future_of_a_transaction_is_small() {
    let store = Store::connect("postgres://localhost/relay", 1).unwrap();
    assert!(size_of_val(&store.pool.begin()) < 4096);
}
