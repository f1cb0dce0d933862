//! Event streams: one gap-free order on every gateway, live and replayed, despite lost copies and crashed gateways.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{
    client::{Api, EventSource, ObserverSocket},
    shared,
    stack::Stack,
    wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn seq(frame: &Value) -> i64 {
    frame["seq"].as_i64().unwrap_or_default()
}

/// Returns the whole log of a workspace, page by page.
async fn whole_log(api: &Api, page: usize) -> Result<Vec<Value>> {
    let mut events = Vec::new();
    let mut since = 0;
    loop {
        let answer = api.get(&format!("/v1/workspace/events?since={since}&limit={page}")).await?.success()?;
        let next = answer["next_since"].as_i64().context("next_since")?;
        let found = answer["events"].as_array().context("events")?;
        ensure!(found.len() <= page, "{} events of {page}", found.len());
        events.extend(found.iter().cloned());
        if next == since {
            return Ok(events);
        }
        since = next;
    }
}

/// Returns a live frame in the form of the log.
fn without_numbers(mut frame: Value) -> Value {
    if let Some(frame) = frame.as_object_mut() {
        frame.remove("seq");
        frame.remove("agent_seq");
    }
    frame
}

#[tokio::test]
async fn both_gateways_show_one_order_and_the_log_agrees() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "observed").await?;
    let mut first = ObserverSocket::open(&gateways[0], key.token()).await?;
    let mut second = ObserverSocket::open(&gateways[1], key.token()).await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob).at(&gateways[1]));
    ann.create_channel("room").await?;
    bob.join("room").await?;
    let posts = (0..40).map(|n| {
        let (ann, bob) = (ann.clone(), bob.clone());
        async move {
            let speaker = if n % 2 == 0 { ann } else { bob };
            speaker.post_message("room", &format!("post {n}")).await?.success()
        }
    });
    futures::future::try_join_all(posts).await?;
    ann.dm("bob", "psst").await?.success()?;

    let (mut live, mut other) = (Vec::new(), Vec::new());
    for (socket, frames) in [(&mut first, &mut live), (&mut second, &mut other)] {
        loop {
            let frame = socket.next(SOON).await?;
            let last = frame["type"] == "dm.received";
            frames.push(frame);
            if last {
                break;
            }
        }
    }
    let numbers: Vec<i64> = live.iter().map(seq).collect();
    assert_eq!(numbers, (numbers[0]..numbers[0] + numbers.len() as i64).collect::<Vec<_>>(), "no gap, no reorder");
    let last = seq(live.last().context("frames")?);
    let from = numbers[0].max(seq(&other[0]));
    let tail =
        |frames: &[Value]| frames.iter().filter(|f| (from..=last).contains(&seq(f))).cloned().collect::<Vec<_>>();
    assert_eq!(tail(&live), tail(&other), "the same frames with the same numbers on both gateways");

    let log = whole_log(&key.at(&gateways[1]), 7).await?;
    assert_eq!(log.iter().map(seq).collect::<Vec<_>>(), (1..=log.len() as i64).collect::<Vec<_>>());
    for frame in &live {
        let logged = log.iter().find(|event| seq(event) == seq(frame)).context("logged")?;
        assert_eq!(logged["payload"], without_numbers(frame.clone()));
        assert_eq!(logged["type"], frame["type"]);
    }
    let created: Vec<&Value> = live.iter().filter(|frame| frame["type"] == "message.created").collect();
    assert_eq!(created.len(), 40);
    assert_eq!(created[0]["channel"], "room");
    assert!(
        created[0]["message"]["attachments"].is_array() && created[0]["id"].as_str().is_some_and(|id| id.len() == 36)
    );
    Ok(())
}

#[tokio::test]
async fn invalid_requests_are_refused_and_unknown_frames_ignored() -> Result<()> {
    let gateway = &shared().await.gateways[0];
    let key = Api::create_workspace(gateway, "refusals").await?;
    let agent = key.register_agent("ann").await?;
    for token in ["", "nonsense", "rk_live_00000000000000000000000000000000", agent.token.as_str()] {
        let refused = ObserverSocket::open(gateway, token).await;
        let error = format!("{:#}", refused.err().context("must be refused")?);
        assert!(error.contains("401"), "{token}: {error}");
    }
    let plain = key.get("/v1/ws").await?;
    assert_eq!(plain.status, 426);
    for query in ["since=-1", "since=x", "limit=0", "limit=-3", "limit=x"] {
        key.get(&format!("/v1/workspace/events?{query}")).await?.refused(400, "invalid_request")?;
    }
    let mut socket = ObserverSocket::open(gateway, key.token()).await?;
    socket.send(json!({ "type": "subscribe", "channels": ["none"] })).await?;
    socket.send(json!({ "type": "nonsense" })).await?;
    socket.send(json!([])).await?;
    assert!(socket.drain(SOON).await?.is_empty());
    key.register_agent("bob").await?;
    key.as_agent(&agent).create_channel("room").await?;
    socket.next_of("channel.created", SOON).await?;
    Ok(())
}

#[tokio::test]
async fn server_sent_events_resume_and_resync() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "sse").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.create_channel("room").await?;
    for n in 0..5 {
        ann.post_message("room", &format!("{n}")).await?.success()?;
    }
    let latest = key.get("/v1/workspace/events").await?.success()?["latest_seq"].as_i64().context("latest")?;

    let mut from_start = EventSource::open(&key, Some(0)).await?;
    let mut seen = Vec::new();
    let count = usize::try_from(latest)?;
    while seen.len() < count {
        seen.push(from_start.next(SOON).await?);
    }
    let ids: Vec<i64> = seen.iter().filter_map(|event| event.id.as_ref()?.parse().ok()).collect();
    assert_eq!(ids, (1..=latest).collect::<Vec<_>>());

    let mut resumed = EventSource::open(&key.at(&gateways[1]), Some(latest - 2)).await?;
    assert_eq!(resumed.next(SOON).await?, seen[count - 2]);
    assert_eq!(resumed.next(SOON).await?, seen[count - 1]);
    ann.post_message("room", "live").await?.success()?;
    let live = resumed.next(SOON).await?;
    assert_eq!(
        (live.id.as_deref(), &live.data["message"]["text"]),
        (Some((latest + 1).to_string().as_str()), &json!("live"))
    );

    let mut beyond = EventSource::open(&key, Some(1_000_000)).await?;
    let resync = beyond.next(SOON).await?;
    assert_eq!((resync.event.as_str(), &resync.data["oldest_seq"]), ("resync", &json!(1)));
    assert_eq!(beyond.next(SOON).await?, seen[0]);
    Ok(())
}

#[tokio::test]
async fn a_reconnected_client_gets_what_it_missed() -> Result<()> {
    let gateway = &shared().await.gateways[0];
    let key = Api::create_workspace(gateway, "resync").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let mut socket = ObserverSocket::open(gateway, key.token()).await?;
    ann.create_channel("room").await?;
    let seen = seq(&socket.next_of("channel.created", SOON).await?);
    drop(socket);
    for n in 0..3 {
        ann.post_message("room", &format!("{n}")).await?.success()?;
    }
    let mut socket = ObserverSocket::open(gateway, key.token()).await?;
    socket.send(json!({ "type": "resync", "last_seen_seq": seen })).await?;
    for n in 0..3 {
        let frame = socket.next(SOON).await?;
        assert_eq!((seq(&frame), &frame["message"]["text"]), (seen + 1 + n, &json!(n.to_string())));
    }
    let ack = socket.next(SOON).await?;
    assert_eq!(
        ack,
        json!({ "type": "resync_ack", "last_seen_seq": seen, "current_seq": seen + 3, "replayed": 3, "gap_detected": false })
    );
    Ok(())
}

/// A gateway crashes under load: an observer resumes with exactly the events that it missed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observers_lose_nothing_when_their_gateway_dies() -> Result<()> {
    let stack = Stack::builder().start().await?;
    let (doomed, other) = (stack.gateway(0), stack.gateway(1));
    let key = Api::create_workspace(other.url(), "survivors").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.create_channel("room").await?;
    let mut socket = ObserverSocket::open(doomed.url(), key.token()).await?;
    let mut witness = ObserverSocket::open(other.url(), key.token()).await?;
    let posting = tokio::spawn({
        let ann = ann.clone();
        async move {
            for n in 0..120 {
                ann.post_message("room", &format!("{n}")).await?.success()?;
            }
            anyhow::Ok(())
        }
    });
    let mut seen = Vec::new();
    while seen.len() < 20 {
        seen.push(seq(&socket.next_of("message.created", SOON).await?));
    }
    doomed.kill9();
    let cursor = *seen.last().context("seen")?;
    let mut resumed = EventSource::open(&key, Some(cursor)).await?;
    while seen.len() < 120 {
        let event = resumed.next(SOON).await?;
        if event.data["type"] == "message.created" {
            seen.push(seq(&event.data));
        }
    }
    posting.await??;
    let mut witnessed = Vec::new();
    while witnessed.len() < 120 {
        witnessed.push(seq(&witness.next_of("message.created", SOON).await?));
    }
    assert_eq!(seen, witnessed);
    Ok(())
}

/// Without NATS nothing is published: observers read Postgres within seconds, in the same order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observers_continue_without_nats() -> Result<()> {
    let stack = Stack::builder().through_proxies(true).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "no-nats").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.create_channel("room").await?;
    let mut socket = ObserverSocket::open(stack.gateway(1).url(), key.token()).await?;
    stack.nats_proxy().cut();
    let mut numbers = Vec::new();
    for n in 0..10 {
        ann.post_message("room", &format!("{n}")).await?.success()?;
        let frame = socket.next_of("message.created", SOON).await?;
        assert_eq!(frame["message"]["text"], json!(n.to_string()));
        numbers.push(seq(&frame));
    }
    stack.nats_proxy().restore();
    assert!(numbers.windows(2).all(|two| two[0] < two[1]));
    wait::until("nats to be back", SOON, || async {
        ann.post_message("room", "again").await.is_ok_and(|reply| reply.is_success())
    })
    .await;
    socket.next_of("message.created", SOON).await?;
    Ok(())
}

/// An edit changes lists but not events: replayed on a socket and from the log, each event has its original content.
#[tokio::test]
async fn an_edited_message_is_replayed_as_announced() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "edited").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob));
    let mut socket = ObserverSocket::open(&gateways[1], key.token()).await?;
    let long = "long ".repeat(8_000);
    let (mut live, mut ids) = (Vec::new(), Vec::new());
    let conversation = ann.dm("bob", "hi").await?.success()?;
    live.push(socket.next_of("dm.received", SOON).await?);
    ids.push(conversation["message"]["id"].as_str().context("id")?.to_owned());
    for text in ["one", &long] {
        let posted = ann.post_message("general", text).await?.success()?;
        ids.push(posted["id"].as_str().context("id")?.to_owned());
        live.push(socket.next_of("message.created", SOON).await?);
    }
    for (n, id) in ids.iter().enumerate() {
        for change in [
            json!({ "text": format!("second {n}") }),
            json!({ "blocks": [{ "kind": "chart" }] }),
            json!({ "text": format!("fourth {n} @bob") }),
        ] {
            ann.patch(&format!("/v1/messages/{id}"), change).await?.success()?;
            live.push(socket.next_of("message.updated", SOON).await?);
        }
    }
    let texts: Vec<&str> = live.iter().filter_map(|frame| frame["message"]["text"].as_str()).collect();
    let mut wanted = vec!["hi".to_owned(), "one".to_owned(), long.clone()];
    for n in 0..3 {
        wanted.extend([format!("second {n}"), format!("second {n}"), format!("fourth {n} @bob")]);
    }
    assert_eq!(texts, wanted);

    let log = whole_log(&key.at(&gateways[1]), 100).await?;
    for frame in &live {
        let logged = log.iter().find(|event| seq(event) == seq(frame)).context("logged")?;
        assert_eq!(logged["payload"], without_numbers(frame.clone()));
    }
    let mut again = EventSource::open(&key, Some(0)).await?;
    for frame in &live {
        let reported = loop {
            let reported = again.next(SOON).await?.data;
            if seq(&reported) == seq(frame) {
                break reported;
            }
        };
        assert_eq!(reported["message"], frame["message"]);
    }
    let shown = bob.get(&format!("/v1/messages/{}", ids[1])).await?.success()?;
    assert_eq!(shown["text"], "fourth 1 @bob", "lists show what it says now");
    Ok(())
}

#[tokio::test]
async fn an_observer_that_leaves_is_answered() -> Result<()> {
    let gateway = &shared().await.gateways[0];
    let key = Api::create_workspace(gateway, "leaving").await?;
    let mut socket = ObserverSocket::open(gateway, key.token()).await?;
    assert!(socket.drain(SOON).await?.is_empty());
    socket.close(1000).await?;
    assert_eq!(socket.closed(SOON).await?.0, 1000);
    Ok(())
}

/// Skipping an event would leave a gap that the observer never notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_event_ends_the_connection_before_it() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "unreadable").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let mut socket = ObserverSocket::open(gateway, key.token()).await?;
    let mut events = EventSource::open(&key, None).await?;
    ann.post_message("general", "small").await?.success()?;
    let small = socket.next_of("message.created", SOON).await?;

    // Large frames are not cached: they are read when they are written, which now fails.
    let database = sqlx::PgPool::connect(stack.database_url()).await?;
    sqlx::query("ALTER TABLE message_edits RENAME COLUMN blocks TO away").execute(&database).await?;
    let long = "long ".repeat(4_000);
    ann.post_message("general", &long).await?.success()?;
    ann.post_message("general", "after").await?.success()?;
    let (code, reason) = socket.closed(SOON).await?;
    assert_eq!((code, reason.contains("resume")), (1013, true), "{reason}");
    loop {
        let event = events.next(SOON).await?;
        assert_ne!(event.data["message"]["text"], "after", "nothing behind the hole");
        if event.event == "close" {
            break;
        }
    }

    sqlx::query("ALTER TABLE message_edits RENAME COLUMN away TO blocks").execute(&database).await?;
    let mut resumed = EventSource::open(&key, Some(seq(&small))).await?;
    let mut texts = Vec::new();
    while texts.len() < 2 {
        let event = resumed.next(SOON).await?;
        if event.data["type"] == "message.created" {
            texts.push(event.data["message"]["text"].clone());
        }
    }
    assert_eq!(texts, [json!(long), json!("after")]);
    Ok(())
}
