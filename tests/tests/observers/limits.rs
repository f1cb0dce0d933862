//! Limits of observer streams: idle streams, expired cursors, slow readers.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use relay_domain::WorkspaceId;
use relay_testkit::{
    client::{Api, EventSource, NodeSocket, ObserverSocket},
    shared,
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Semaphore;

/// Timeout for a loaded machine.
const SOON: Duration = Duration::from_secs(30);

fn seq(frame: &Value) -> i64 {
    frame["seq"].as_i64().unwrap_or_default()
}

#[tokio::test]
async fn a_silent_event_stream_is_kept_alive() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "keepalive").await?;
    let mut stream = EventSource::open(&key, None).await?;
    // Every 15 s a keep-alive is sent: a comment, or the position for a resuming client.
    let silence = stream.next(Duration::from_secs(32)).await;
    if let Ok(event) = &silence {
        assert!(event.id.is_some() && event.data.is_null(), "nothing happens here, and yet: {event:?}");
    }
    assert!(silence.is_ok() || stream.comments >= 1, "32 s without a sign of life");
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.create_channel("room").await?;
    while stream.next(SOON).await?.data["type"] != "channel.created" {}
    Ok(())
}

#[tokio::test]
async fn an_expired_cursor_is_reported_once() -> Result<()> {
    let shared = shared().await;
    let key = Api::create_workspace(shared.any_gateway(), "too-old").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.create_channel("room").await?;
    for n in 0..4 {
        ann.post_message("room", &format!("{n}")).await?.success()?;
    }
    let page = key.get("/v1/workspace/events").await?.success()?;
    let latest = page["latest_seq"].as_i64().context("latest_seq")?;
    let workspace: WorkspaceId = key.get("/v1/workspace").await?.success()?["id"].as_str().context("id")?.parse()?;
    // Simulates the retention of event records.
    let mut postgres = PgConnection::connect(&shared.database_url).await?;
    sqlx::query("DELETE FROM event_log WHERE workspace_id = $1 AND last_seq <= $2")
        .bind(workspace.get())
        .bind(latest - 2)
        .execute(&mut postgres)
        .await?;

    let mut stream = EventSource::open(&key, Some(1)).await?;
    let resync = stream.next(SOON).await?;
    assert_eq!((&*resync.event, &resync.data["oldest_seq"]), ("resync", &json!(latest - 1)));
    for seq in [latest - 1, latest] {
        assert_eq!(stream.next(SOON).await?.id, Some(seq.to_string()));
    }
    ann.post_message("room", "live").await?.success()?;
    assert_eq!(stream.next(SOON).await?.id, Some((latest + 1).to_string()), "once, and then on as ever");
    Ok(())
}

/// A slow reader is disconnected with a reason and resumes; other observers are unaffected.
#[tokio::test]
async fn an_observer_that_does_not_read_is_cut_and_resumes() -> Result<()> {
    // More than all socket buffers and rings hold.
    const POSTS: usize = 1500;
    const TEXT: usize = 12_000;
    // Posts that the reading observer may be behind by: on a busy machine it would be cut as well.
    const BEHIND: usize = 100;
    // Deliveries between two heartbeats of the recipient: on a busy machine the test outlasts its liveness time.
    const HEARTBEAT_EVERY: usize = 100;
    let gateway = shared().await.any_gateway();
    let key = Api::create_workspace(gateway, "stuck").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (as_ann, as_bob) = (key.as_agent(&ann), key.as_agent(&bob));
    let node = as_bob.direct_node_token().await?;
    let mut recipient = NodeSocket::connect(&as_bob.ws_base(), &node.token).await?;
    recipient.register_direct(&node.node_id, &node.name).await?;
    recipient.auto_ack(true);
    let mut stuck = ObserverSocket::open(gateway, key.token()).await?;
    let mut reader = ObserverSocket::open(gateway, key.token()).await?;
    let window = Arc::new(Semaphore::new(BEHIND));
    let posts_in_window = window.clone();
    let posting = tokio::spawn(async move {
        let text = "x".repeat(TEXT);
        for n in 0..POSTS {
            posts_in_window.acquire().await?.forget();
            as_ann.dm("bob", &format!("{n} {text}")).await?.success()?;
        }
        anyhow::Ok(())
    });
    let (mut read, mut posted, mut delivered) = (Vec::new(), 0, 0);
    while posted < POSTS || delivered < POSTS {
        tokio::select! {
            frame = reader.next(SOON) => {
                let frame = frame?;
                if frame["type"] == "dm.received" {
                    posted += 1;
                    window.add_permits(1);
                }
                read.push(seq(&frame));
            }
            frame = recipient.next_frame(SOON) => {
                delivered += usize::from(frame?["type"] == "deliver");
                if delivered % HEARTBEAT_EVERY == 0 {
                    recipient.heartbeat(&node.node_id).await?;
                }
            }
        }
    }
    posting.await??;
    let (first, last) = (read[0], read[read.len() - 1]);
    assert_eq!(read, (first..=last).collect::<Vec<_>>(), "an observer that reads misses nothing");

    let mut seen = first - 1;
    let cut = loop {
        match stuck.next(SOON).await {
            Ok(frame) => {
                assert_eq!(seq(&frame), seen + 1, "no event is missing before the cut");
                seen += 1;
            }
            Err(error) => break error,
        }
    };
    assert!(seen < last, "it was cut before the end: {cut:#}");
    let mut stream = EventSource::open(&key, Some(seen)).await?;
    for seq in seen + 1..=last {
        assert_eq!(stream.next(SOON).await?.id, Some(seq.to_string()));
    }
    Ok(())
}
