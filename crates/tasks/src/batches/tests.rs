use super::*;

/// Queue of pairs: key and number, each of `number` bytes.
fn pairs(
    max_bytes: u32,
    batch_items: usize,
    batch_bytes: usize,
) -> (BatchSender<(u8, usize), u8>, Batches<(u8, usize), u8>) {
    queue(pairs_config(max_bytes, batch_items, batch_bytes))
}

fn pairs_config(max_bytes: u32, batch_items: usize, batch_bytes: usize) -> QueueConfig<(u8, usize), u8> {
    QueueConfig {
        name: "test",
        max_items: 16,
        key_share: 1,
        max_bytes,
        batch_items,
        batch_bytes,
        batch_weight: u64::MAX,
        interval: Duration::ZERO,
        linger: Linger::NONE,
        key: |(key, _)| *key,
        bytes: |(_, bytes)| *bytes,
        weight: |_| 1,
    }
}

fn send_all(sender: &BatchSender<(u8, usize), u8>, items: &[(u8, usize)]) {
    items.iter().for_each(|item| sender.try_send(*item).unwrap());
}

#[tokio::test]
async fn keys_take_turns() {
    let (sender, mut batches) = pairs(1000, 3, 1000);
    send_all(&sender, &[(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 0), (1, 1), (1, 2)]);
    send_all(&sender, &[(2, 0)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 3), (2, 0), (1, 4)]);
    drop(sender);
    assert_eq!(batches.next().await, None);
}

#[tokio::test]
async fn turns_are_equal_in_weight() {
    let config = QueueConfig { weight: |(_, weight)| *weight as u64, ..pairs_config(1000, 1, 1000) };
    let (sender, mut batches) = queue(config);
    send_all(&sender, &[(1, 4), (1, 4), (1, 4), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1)]);
    let mut keys = Vec::new();
    for _ in 0..8 {
        keys.push(batches.next().await.unwrap()[0].0);
    }
    assert_eq!(keys, [1, 2, 2, 2, 2, 1, 2, 1], "four items of key 2 for each of key 1");
}

#[tokio::test]
async fn a_batch_is_complete_at_its_weight() {
    let config = QueueConfig { weight: |(_, weight)| *weight as u64, batch_weight: 10, ..pairs_config(1000, 16, 1000) };
    let (sender, mut batches) = queue(config);
    send_all(&sender, &[(1, 9), (1, 9), (1, 1), (1, 1)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 9), (1, 9)], "the last item may exceed the weight");
    assert_eq!(batches.next().await.unwrap(), [(1, 1), (1, 1)]);
}

#[tokio::test]
async fn a_key_holds_at_most_its_share_of_the_queue() {
    let (sender, mut batches) = queue(QueueConfig { key_share: 8, ..pairs_config(1000, 16, 1000) });
    send_all(&sender, &[(1, 0), (1, 1)]);
    assert_eq!(sender.try_send((1, 2)), Err(QueueFull));
    send_all(&sender, &[(2, 0)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 0), (2, 0), (1, 1)]);
    send_all(&sender, &[(1, 200)]);
    assert_eq!(sender.try_send((1, 1)), Err(QueueFull), "it has its bytes, in one item");
    assert_eq!(batches.next().await.unwrap(), [(1, 200)]);
    send_all(&sender, &[(1, 2), (1, 3)]);
    assert_eq!(sender.try_send((1, 4)), Err(QueueFull));
}

#[tokio::test]
async fn items_that_were_put_back_keep_their_order() {
    let (sender, mut batches) = pairs(1000, 3, 1000);
    send_all(&sender, &[(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 0), (2, 0), (1, 1)]);
    batches.put_back(vec![(1, 0), (2, 0), (1, 1)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 0), (2, 0), (1, 1)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 2), (1, 3)]);
}

#[tokio::test]
async fn items_of_one_key_can_be_taken_alone() {
    let (sender, mut batches) = pairs(1000, 2, 1000);
    send_all(&sender, &[(2, 0), (1, 0), (2, 1), (1, 1), (1, 2), (1, 3)]);
    assert_eq!(batches.next().await.unwrap(), [(2, 0), (1, 0)]);
    assert_eq!(batches.take_key(1), [(1, 1), (1, 2)]);
    assert_eq!(batches.take_key(1), [(1, 3)]);
    assert_eq!(batches.take_key(1), []);
    assert_eq!(batches.next().await.unwrap(), [(2, 1)]);
}

#[tokio::test]
async fn a_batch_is_bounded_in_bytes_but_for_its_first_item() {
    let (sender, mut batches) = pairs(1000, 16, 10);
    send_all(&sender, &[(1, 4), (1, 6), (1, 1), (1, 50), (1, 2)]);
    for expected in [&[(1, 4), (1, 6)][..], &[(1, 1)], &[(1, 50)], &[(1, 2)]] {
        assert_eq!(batches.next().await.unwrap(), expected);
    }
}

#[tokio::test]
async fn a_full_queue_refuses_until_a_batch_is_taken() {
    let (sender, mut batches) = pairs(10, 1, 1000);
    send_all(&sender, &[(1, 7)]);
    assert_eq!(sender.try_send((1, 4)), Err(QueueFull));
    send_all(&sender, &[(1, 3)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 7)]);
    // The second item waits still; one that is larger than the queue fits once that is empty.
    assert_eq!(sender.try_send((1, 50)), Err(QueueFull));
    assert_eq!(batches.next().await.unwrap(), [(1, 3)]);
    send_all(&sender, &[(1, 50)]);
    assert_eq!(sender.try_send((1, 1)), Err(QueueFull));
    send_all(&sender, &[(1, 0); 15]);
    assert_eq!(sender.try_send((1, 0)), Err(QueueFull), "16 items wait");
}

#[tokio::test(start_paused = true)]
async fn the_first_batch_is_taken_at_once_and_later_ones_at_their_interval() {
    let every = Duration::from_millis(100);
    let (sender, mut batches) = queue(QueueConfig::<u8>::new("test", 8, 8).at_most_every(every));
    let began = Instant::now();
    for (item, at) in [(1, 0), (2, 100), (3, 200)] {
        sender.try_send(item).unwrap();
        assert_eq!(batches.next().await.unwrap(), [item]);
        assert_eq!(began.elapsed(), Duration::from_millis(at));
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    sender.try_send(4).unwrap();
    batches.next().await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_millis(1200), "an idle queue waits for nothing");
}

#[tokio::test]
async fn senders_wait_for_room_and_receive_their_replies() {
    let (sender, mut batches) = queue(QueueConfig::<Request<u8, u8>>::new("test", 1, 4));
    let asked = async { (sender.request(1).await.await, sender.request(2).await.await) };
    let answering = async {
        for _ in 0..2 {
            let (items, replies) = Request::split(batches.next().await.unwrap());
            items.into_iter().zip(replies).for_each(|(item, reply)| reply.send(item * 10).unwrap());
        }
    };
    let (answers, ()) = tokio::join!(asked, answering);
    assert_eq!(answers, (Ok(10), Ok(20)));
    drop(batches);
    assert!(sender.request(3).await.await.is_err());
    assert_eq!(sender.try_request(4).err(), Some(QueueFull));
    sender.closed().await;
}

#[tokio::test(start_paused = true)]
async fn a_busy_queue_waits_for_further_items_and_an_idle_one_does_not() {
    let linger = Linger { after_items: 2, time: Duration::from_millis(4) };
    let (sender, mut batches) = queue(QueueConfig { linger, ..pairs_config(1000, 3, 1000) });
    let started = Instant::now();
    send_all(&sender, &[(1, 0)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 0)]);
    send_all(&sender, &[(1, 1), (1, 2)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 1), (1, 2)]);
    assert_eq!(started.elapsed(), Duration::ZERO, "the batches before were small");
    send_all(&sender, &[(1, 3)]);
    // Polled in this order: the second item arrives while the first one lingers.
    let (batch, ()) = tokio::join!(biased; batches.next(), async { send_all(&sender, &[(1, 4)]) });
    assert_eq!(batch.unwrap(), [(1, 3), (1, 4)]);
    assert_eq!(started.elapsed(), Duration::from_millis(4));
    send_all(&sender, &[(1, 5), (1, 6), (1, 7)]);
    assert_eq!(batches.next().await.unwrap(), [(1, 5), (1, 6), (1, 7)]);
    assert_eq!(started.elapsed(), Duration::from_millis(4), "a full batch waits for nothing");
}
