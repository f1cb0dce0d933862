//! Dead letters: creation, inspection and redrives.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::{binaries, shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Workspace with the sender ann and the offline recipient bob.
async fn workspace(name: &str) -> Result<(Api, Api, Api)> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let ann = key.register_agent("ann").await?;
    let bob = key.register_agent("bob").await?;
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob));
    Ok((key, ann, bob))
}

async fn send_with_short_ttl(ann: &Api, to: &str, words: &str) -> Result<()> {
    ann.post("/v1/dm", json!({ "to": to, "text": words, "ttl_ms": 1000 })).await?.success()?;
    Ok(())
}

/// Extends the TTL to an hour: a redriven delivery has the TTL of its dead letter.
async fn set_long_ttl(key: &Api) -> Result<()> {
    sqlx::query("UPDATE deliveries SET expires_at = created_at + interval '1 hour' WHERE workspace_id = $1")
        .bind(text(&key.get("/v1/workspace").await?.success()?["id"]).parse::<i64>()?)
        .execute(&sqlx::PgPool::connect(&shared().await.database_url).await?)
        .await?;
    Ok(())
}

/// Waits for this number of dead letters, redriven or not, and returns the first page.
async fn wait_for_letters(key: &Api, count: usize) -> Result<Vec<Value>> {
    wait::until_ok("dead letters", SOON, || async {
        let summary = key.get("/v1/dead-letters/summary").await?.success()?;
        ensure!(summary["total"].as_u64() >= Some(count as u64), "{summary}");
        Ok(list(&key.get("/v1/dead-letters").await?.success()?).to_vec())
    })
    .await
}

#[tokio::test]
async fn an_expired_message_can_be_redriven() -> Result<()> {
    let (key, ann, bob) = workspace("letters").await?;
    for wrong in [json!(999), json!(518_400_001), json!(-1), json!("soon")] {
        ann.post("/v1/dm", json!({ "to": "bob", "text": "x", "ttl_ms": wrong }))
            .await?
            .refused(400, "invalid_request")?;
    }
    // Observes the log, so that the sender's notice is recorded too.
    key.get("/v1/workspace/events?since=0&limit=1").await?.success()?;
    send_with_short_ttl(&ann, "bob", "first").await?;
    ann.dm("bob", "second lives as long as usual").await?.success()?;
    let letters = wait_for_letters(&key, 1).await?;
    let letter = &letters[0];
    let id = text(&letter["delivery_id"]).to_owned();
    assert_eq!((letters.len(), text(&letter["reason"]), letter["seq"].as_i64()), (1, "ttl_expired", Some(1)));
    assert_eq!((text(&letter["agent_name"]), text(&letter["sender_name"])), ("bob", "ann"));
    assert_eq!((&letter["redriven_as"], letter["redrive_count"].as_i64()), (&Value::Null, Some(0)));
    assert_eq!(key.get(&format!("/v1/dead-letters/{id}")).await?.success()?, *letter);
    for (query, found) in [
        ("agent=bob", 1),
        ("agent=ann", 0),
        ("reason=ttl_expired", 1),
        ("reason=rejected", 0),
        ("until=2020-01-01T00:00:00Z", 0),
        ("since=2020-01-01T00:00:00Z", 1),
        ("node=nowhere", 0),
        (&format!("node={}", text(&letter["node_id"])), 1),
        (&format!("before={id}"), 0),
    ] {
        let found_now = key.get(&format!("/v1/dead-letters?{query}")).await?.success()?;
        assert_eq!(list(&found_now).len(), found, "{query}");
    }
    key.get("/v1/dead-letters?reason=boredom").await?.refused(400, "invalid_request")?;
    key.get("/v1/dead-letters?agent=nobody").await?.refused(404, "agent_not_found")?;
    key.get("/v1/dead-letters/del_1_2").await?.refused(404, "delivery_not_found")?;
    let log = key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    let reported = list(&log["events"]).iter().find(|event| event["type"] == "delivery.failed").context("a notice")?;
    assert_eq!(
        (text(&reported["payload"]["delivery_id"]), text(&reported["payload"]["reason"])),
        (&*id, "ttl_expired")
    );

    set_long_ttl(&key).await?;
    let dry = json!({ "delivery_id": id, "dry_run": true });
    assert_eq!(key.post("/v1/dead-letters/redrive", dry).await?.success()?["matched"], 1);
    let redrive = || key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id }));
    let done = redrive().await?.success()?;
    assert_eq!((text(&done["redriven_as"]), done["seq"].as_i64()), (&*format!("{id}_r1"), Some(3)));
    assert_eq!(redrive().await?.success()?, done, "once only");
    let letter = key.get(&format!("/v1/dead-letters/{id}")).await?.success()?;
    assert_eq!(text(&letter["redriven_as"]), format!("{id}_r1"));

    // The dead letter's seq is a tombstone or skipped, the two others come in order.
    let mut socket = bob.direct_socket().await?;
    let durable = |frame: &Value| frame["type"] == "deliver" && frame["seq"].as_u64() > Some(1);
    let second = socket.expect_where("seq 2", SOON, durable).await?;
    let again = socket.expect_where("seq 3", SOON, durable).await?;
    assert_eq!((second["seq"].as_u64(), again["seq"].as_u64()), (Some(2), Some(3)));
    let message = text(&letter["message_id"]);
    assert_eq!(text(&again["msg_id"]), format!("{message}_r1"), "a new message to brokers");
    assert_eq!(text(&again["payload"]["data"]["text"]), "first");
    Ok(())
}

#[tokio::test]
async fn a_dead_letter_is_redriven_three_times_at_most() -> Result<()> {
    let (key, ann, _) = workspace("thrice").await?;
    send_with_short_ttl(&ann, "bob", "again and again").await?;
    let mut id = text(&wait_for_letters(&key, 1).await?[0]["delivery_id"]).to_owned();
    for number in 1..=3 {
        let done = key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id })).await?.success()?;
        assert!(text(&done["redriven_as"]).ends_with(&format!("_r{number}")), "{done}");
        // The TTL is that of the original delivery.
        let letters = wait_for_letters(&key, number + 1).await?;
        id = text(&letters[0]["delivery_id"]).to_owned();
        assert_eq!(id, text(&done["redriven_as"]), "the youngest is first");
    }
    key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id }))
        .await?
        .refused(409, "delivery_not_redrivable")?;
    Ok(())
}

#[tokio::test]
async fn redriving_by_filter_keeps_its_rate_and_repeats_nothing() -> Result<()> {
    let full = std::env::var("RELAY_CHAOS").is_ok_and(|chaos| chaos == "full");
    let (posts, rate) = if full { (1000, 1000) } else { (40, 200) };
    const AGENTS: usize = 10;
    let letters = posts * AGENTS;
    let (key, ann, _) = workspace("by-filter").await?;
    key.create_channel("dev").await?;
    let mut members = BTreeMap::new();
    for number in 0..AGENTS {
        let agent = key.register_agent(&format!("member-{number}")).await?;
        key.as_agent(&agent).join("dev").await?;
        members.insert(agent.name.clone(), key.as_agent(&agent));
    }
    for number in 0..posts {
        let body = json!({ "text": number.to_string(), "ttl_ms": 1000 });
        ann.post("/v1/channels/dev/messages", body).await?.success()?;
    }
    wait_for_letters(&key, letters).await?;
    let summary = key.get("/v1/dead-letters/summary").await?.success()?;
    assert_eq!(
        (summary["total"].as_u64(), summary["by_reason"]["ttl_expired"].as_u64()),
        (Some(letters as u64), Some(letters as u64))
    );

    // Other messages continue meanwhile.
    let stop = Arc::new(AtomicBool::new(false));
    let (is_stopped, writer) = (Arc::clone(&stop), ann.clone());
    let traffic = tokio::spawn(async move {
        let mut sent = 0;
        while !is_stopped.load(Ordering::SeqCst) {
            writer.dm("bob", &sent.to_string()).await?.success()?;
            sent += 1;
        }
        anyhow::Ok(sent)
    });
    let filter = json!({ "reason": "ttl_expired", "older_than_seconds": 0 });
    let dry = key.post("/v1/dead-letters/redrive", json!({ "filter": filter, "dry_run": true })).await?.success()?;
    assert_eq!(dry["matched"].as_u64(), Some(letters as u64));
    set_long_ttl(&key).await?;
    let began = Instant::now();
    let begun = key.post("/v1/dead-letters/redrive", json!({ "filter": filter, "rate": rate })).await?.success()?;
    assert_eq!((text(&begun["status"]), begun["matched"].as_u64()), ("running", Some(letters as u64)));
    let path = format!("/v1/dead-letters/redrives/{}", text(&begun["redrive_id"]));
    let through = wait::until_ok("the redrive to be through", Duration::from_secs(120), || async {
        let shown = key.get(&path).await?.success()?;
        ensure!(shown["status"] == "finished", "{shown}");
        Ok(shown)
    })
    .await?;
    let took = began.elapsed();
    stop.store(true, Ordering::SeqCst);
    assert!(traffic.await?? > 0);
    assert_eq!((through["redriven"].as_u64(), through["refused"].as_u64()), (Some(letters as u64), Some(0)));
    // All but the burst of one second.
    let at_least = Duration::from_secs_f64((letters as f64 / f64::from(rate) - 1.5).max(0.0));
    assert!(took >= at_least, "{letters} at {rate} a second took {took:?}");
    for (name, member) in &members {
        let rows = member.get("/v1/deliveries?limit=200").await?.success()?;
        let seqs: Vec<i64> = list(&rows).iter().filter_map(|row| row["seq"].as_i64()).collect();
        let expected: Vec<i64> = (posts as i64 + 1..=2 * posts as i64).take(200).collect();
        assert_eq!(seqs, expected, "{name}: each letter once, without a gap");
        assert!(list(&rows).iter().all(|row| text(&row["id"]).ends_with("_r1")), "{name}");
    }

    // A second redrive finds nothing to do.
    let again = key.post("/v1/dead-letters/redrive", json!({ "filter": filter, "rate": rate })).await?.success()?;
    assert_eq!(again["matched"], 0);
    let path = format!("/v1/dead-letters/redrives/{}", text(&again["redrive_id"]));
    let again = wait::until_ok("the second redrive to be through", SOON, || async {
        let shown = key.get(&path).await?.success()?;
        ensure!(shown["status"] == "finished", "{shown}");
        Ok(shown)
    })
    .await?;
    assert_eq!((&again["redriven"], &again["refused"]), (&json!(0), &json!(0)));
    for wrong in [json!({}), json!({ "filter": {}, "delivery_id": "x" }), json!({ "filter": {}, "rate": 0 })] {
        key.post("/v1/dead-letters/redrive", wrong).await?.refused(400, "invalid_request")?;
    }
    key.get("/v1/dead-letters/redrives/7").await?.refused(404, "redrive_not_found")?;
    Ok(())
}

#[tokio::test]
async fn deliveries_of_a_deleted_agent_become_dead_letters_that_can_be_purged() -> Result<()> {
    let (key, ann, _) = workspace("deleted").await?;
    for number in 0..3 {
        ann.dm("bob", &number.to_string()).await?.success()?;
    }
    assert_eq!(key.delete("/v1/agents/bob").await?.status, 204);
    let letters = wait_for_letters(&key, 3).await?;
    assert!(letters.iter().all(|letter| letter["reason"] == "agent_deleted"), "{letters:?}");
    let id = text(&letters[0]["delivery_id"]).to_owned();
    key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id }))
        .await?
        .refused(409, "delivery_not_redrivable")?;

    assert_eq!(key.delete(&format!("/v1/dead-letters/{id}")).await?.status, 204);
    key.get(&format!("/v1/dead-letters/{id}")).await?.refused(404, "delivery_not_found")?;
    key.delete(&format!("/v1/dead-letters/{id}")).await?.refused(404, "delivery_not_found")?;
    let purge = |dry: bool| {
        key.post("/v1/dead-letters/purge", json!({ "filter": { "reason": "agent_deleted" }, "dry_run": dry }))
    };
    assert_eq!(purge(true).await?.success()?["purged"], 2);
    assert_eq!(purge(false).await?.success()?["purged"], 2);
    assert_eq!(purge(false).await?.success()?["purged"], 0);
    assert_eq!(key.get("/v1/dead-letters/summary").await?.success()?, json!({ "total": 0, "by_reason": {} }));
    Ok(())
}

#[tokio::test]
async fn a_rejected_delivery_becomes_a_dead_letter() -> Result<()> {
    let (key, ann, bob) = workspace("rejected").await?;
    let mut notices = ann.direct_socket().await?;
    for number in 1..=3 {
        ann.dm("bob", &number.to_string()).await?.success()?;
    }
    let rows = bob.get("/v1/deliveries").await?.success()?;
    let id = text(&rows[1]["id"]).to_owned();
    let fail = format!("/v1/deliveries/{id}/fail");
    for _ in 0..2 {
        let failed = bob.post(&fail, json!({ "error": "not for me", "retryable": false })).await?.success()?;
        assert_eq!((text(&failed["status"]), text(&failed["error"])), ("failed", "not for me"), "{failed}");
    }
    let letters = wait_for_letters(&key, 1).await?;
    let letter = &letters[0];
    assert_eq!((letters.len(), text(&letter["reason"]), text(&letter["error"])), (1, "rejected", "not for me"));
    assert_eq!((text(&letter["delivery_id"]), text(&letter["sender_name"])), (&*id, "ann"));
    let reported = notices.expect_where("the notice", SOON, |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!(
        (text(&reported["data"]["reason"]), text(&reported["data"]["delivery_id"])),
        ("rejected", &*id),
        "{reported}"
    );
    assert_eq!(
        (text(&reported["data"]["error"]), &reported["data"]["retryable"]),
        ("not for me", &json!(false)),
        "{reported}"
    );
    let listed = |status: &'static str| {
        let bob = bob.clone();
        async move {
            let rows = bob.get(&format!("/v1/deliveries?status={status}")).await?.success()?;
            anyhow::Ok(list(&rows).iter().filter_map(|row| row["seq"].as_i64()).collect::<Vec<_>>())
        }
    };
    assert_eq!(listed("failed").await?, [2], "to its recipient it has failed");
    assert_eq!((listed("dead_lettered").await?, listed("queued").await?), (vec![], vec![1, 3]));

    // The others are untouched, and this one can be redriven.
    let done = key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id })).await?.success()?;
    assert_eq!((text(&done["redriven_as"]), done["seq"].as_i64()), (&*format!("{id}_r1"), Some(4)));
    let mut socket = bob.direct_socket().await?;
    let mut kinds = Vec::new();
    while kinds.len() < 4 {
        kinds.push(text(&socket.expect("deliver").await?["payload"]["type"]).to_owned());
    }
    assert_eq!(kinds, ["dm.received", "delivery.expired", "dm.received", "dm.received"], "a tombstone in its place");
    Ok(())
}

#[tokio::test]
async fn a_workspace_sets_the_ttl_of_deliveries() -> Result<()> {
    let (key, ann, bob) = workspace("lifetimes").await?;
    for wrong in [json!(59), json!(518_401), json!("long")] {
        key.patch("/v1/workspace", json!({ "delivery_ttl_seconds": wrong })).await?.refused(400, "invalid_request")?;
    }
    let shown = key.patch("/v1/workspace", json!({ "delivery_ttl_seconds": 120 })).await?.success()?;
    assert_eq!(shown["delivery_ttl_seconds"], 120);
    assert_eq!(key.get("/v1/workspace").await?.success()?["delivery_ttl_seconds"], 120);
    ann.dm("bob", "briefly").await?.success()?;
    ann.post("/v1/dm", json!({ "to": "bob", "text": "longer", "ttl_ms": 3_600_000 })).await?.success()?;
    let rows = bob.get("/v1/deliveries").await?.success()?;
    let life = |row: &Value| -> Result<i64> {
        let at = |field: &str| text(&row[field]).parse::<chrono::DateTime<chrono::Utc>>();
        Ok((at("expires_at")? - at("created_at")?).num_seconds())
    };
    assert_eq!((life(&rows[0])?, life(&rows[1])?), (120, 3600));
    Ok(())
}

#[tokio::test]
async fn an_operator_redrives_from_a_terminal() -> Result<()> {
    let (key, ann, bob) = workspace("terminal").await?;
    let workspace = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
    for number in 0..3 {
        send_with_short_ttl(&ann, "bob", &number.to_string()).await?;
    }
    let letters = wait_for_letters(&key, 3).await?;
    set_long_ttl(&key).await?;
    let program = binaries::find(&binaries::directory()?, "relayctl")?;
    let database = shared().await.database_url.clone();
    let relayctl = |command: &[&str], arguments: &[&str]| -> Result<(bool, String)> {
        let output = Command::new(&program)
            .args(command)
            .args(["--workspace", &workspace])
            .args(arguments)
            .env("DATABASE_URL", &database)
            .output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let listed = || -> Result<Vec<Value>> {
        let (done, reported) = relayctl(&["--json", "dead-letter", "list"], &[])?;
        ensure!(done, "{reported}");
        Ok(list(&serde_json::from_str(&reported)?).to_vec())
    };
    // By API ids, so that one of them can be selected.
    let rows = listed()?;
    let ids =
        |rows: &[Value]| -> BTreeSet<String> { rows.iter().map(|row| text(&row["delivery_id"]).to_owned()).collect() };
    assert_eq!(ids(&rows), ids(&letters));
    assert!(rows.iter().all(|row| row["redriven_as"].is_null() && row["agent"] == "bob"), "{rows:?}");
    let id = text(&rows[0]["delivery_id"]).to_owned();
    let (done, reported) = relayctl(&["redrive"], &["--delivery", &id, "--dry-run"])?;
    assert!(done && reported.trim() == format!("{id}: ttl_expired"), "{reported}");

    let (long, short) = (["dead-letter", "redrive"], ["redrive"]);
    for command in [&long[..], &short[..]] {
        assert!(!relayctl(command, &[])?.0, "not without saying which");
        let (done, reported) = relayctl(command, &["--all", "--dry-run"])?;
        assert!(done && reported.contains("3  dead letters"), "{reported}");
    }
    let (done, reported) = relayctl(&short, &["--delivery", &id])?;
    assert!(done && reported.contains(&format!("{id}_r1")), "{reported}");
    let marked = listed()?.into_iter().find(|row| row["delivery_id"] == id).context("it is listed")?;
    assert_eq!((text(&marked["redriven_as"]), &marked["redrive_no"]), (&*format!("{id}_r1"), &json!(0)), "{marked}");
    let (_, table) = relayctl(&["dead-letter", "list"], &["--agent", "bob"])?;
    assert!(table.contains("SENT AGAIN AS") && table.contains(&format!("{id}_r1")), "{table}");
    let (done, reported) = relayctl(&long, &["--agent", "bob", "--rate", "500"])?;
    assert!(done && reported.contains("is done: 2 of 2 sent again"), "{reported}");
    wait::until_ok("the letters to be deliveries again", SOON, || async {
        let letters = key.get("/v1/dead-letters").await?.success()?;
        let redriven = list(&letters).iter().filter(|letter| letter["redriven_as"].is_string()).count();
        ensure!(redriven == 3, "{letters}");
        Ok(())
    })
    .await?;
    let purge = |arguments: &[&str]| relayctl(&["dead-letter", "purge"], arguments);
    assert!(!purge(&[])?.0, "not without saying which");
    let (done, reported) = purge(&["--agent", "bob", "--dry-run"])?;
    assert!(done && reported.contains("3  dead letters"), "{reported}");
    assert_eq!(list(&key.get("/v1/dead-letters").await?.success()?).len(), 3, "a dry run changes nothing");
    let (done, reported) = purge(&["--reason", "ttl_expired"])?;
    assert!(done && reported.contains("3 dead letters were purged"), "{reported}");
    assert_eq!(list(&key.get("/v1/dead-letters").await?.success()?).len(), 0);
    assert_eq!(listed()?, Vec::<Value>::new(), "what is out of sight is out of sight here too");
    drop(bob);
    Ok(())
}
