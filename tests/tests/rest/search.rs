//! Search: messages are found from their 2xx on, ranked, filtered, and limited to the caller's conversations.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Agent, Api};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};
use sqlx::Connection as _;

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

struct Room {
    key: Api,
    ann: Api,
    bob: Api,
    eve: Api,
    ann_is: Agent,
}

async fn room(name: &str) -> Result<Room> {
    let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
    let (ann_is, bob, eve) =
        (key.register_agent("ann").await?, key.register_agent("bob").await?, key.register_agent("eve").await?);
    let (ann, bob) = (key.as_agent(&ann_is), key.as_agent(&bob).at(&shared().await.gateways[1]));
    let eve = key.as_agent(&eve);
    ann.create_channel("room").await?;
    bob.join("room").await?;
    Ok(Room { key, ann, bob, eve, ann_is })
}

async fn search_ids(api: &Api, query: &str) -> Result<Vec<String>> {
    let rows = api.get(&format!("/v1/search?{query}")).await?.success()?;
    let rows = rows.as_array().cloned().unwrap_or_default();
    Ok(rows.iter().map(|row| text(&row["text"]).to_owned()).collect())
}

/// Waits until the worker has indexed all messages of the workspace.
async fn indexed(key: &Api, wanted: i64) -> Result<()> {
    let id: i64 = text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?;
    let url = shared().await.database_url.clone();
    wait::until_ok("the messages to be indexed", Duration::from_secs(30), || async {
        let mut connection = sqlx::PgConnection::connect(&url).await?;
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM message_search WHERE workspace_id = $1")
            .bind(id)
            .fetch_one(&mut connection)
            .await?;
        anyhow::ensure!(count == wanted, "{count} of {wanted}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn a_message_is_found_before_and_after_it_is_indexed() -> Result<()> {
    let room = room("search").await?;
    let posted = room.ann.post_message("room", "The Build is green").await?.success()?;
    room.ann.post_message("room", "build build build").await?.success()?;
    room.bob.post_message("general", "who broke the build-server?").await?.success()?;
    let root = text(&posted["id"]);
    room.bob
        .post(&format!("/v1/messages/{root}/replies"), json!({ "text": "which build is that" }))
        .await?
        .success()?;
    let check = || async {
        let rows = room.bob.get("/v1/search?q=build").await?.success()?;
        assert_eq!(rows.as_array().map(Vec::len), Some(4), "{rows}");
        assert_eq!(text(&rows[0]["text"]), "build build build", "the best match first");
        let rows: Vec<_> = rows.as_array().cloned().unwrap_or_default();
        let scores: Vec<_> = rows.iter().map(|row| row["relevance_score"].as_f64().unwrap_or(-1.0)).collect();
        assert!(scores.windows(2).all(|pair| pair[0] >= pair[1] && pair[1] > 0.0), "{scores:?}");
        let row = rows.iter().find(|row| row["id"] == posted["id"]).cloned().unwrap_or_default();
        assert_eq!(
            (text(&row["channel_name"]), &row["channel_id"], &row["conversation_id"], text(&row["agent_name"])),
            ("room", &posted["channel_id"], &Value::Null, "ann")
        );
        assert_eq!((text(&row["agent_id"]), &row["created_at"]), (&*room.ann_is.id, &posted["created_at"]));
        for (query, expected) in [
            ("q=green", vec!["The Build is green"]),
            ("q=GREEN+-broke", vec!["The Build is green"]),
            ("q=green+-build", vec![]),
            ("q=%22is+green%22", vec!["The Build is green"]),
            ("q=%22green+is%22", vec![]),
            ("q=green+or+broke&in=general", vec!["who broke the build-server?"]),
            ("q=build&channel=general", vec!["who broke the build-server?"]),
            ("q=build&channel=%23general", vec!["who broke the build-server?"]),
            ("q=build&from=bob&in=general", vec!["who broke the build-server?"]),
            ("q=build&from=nobody", vec![]),
            ("q=build&channel=nowhere", vec![]),
            ("q=build&limit=1", vec!["build build build"]),
            ("q=unheard", vec![]),
            (&*format!("q=build&before={root}"), vec![]),
            (&*format!("q=green&after={root}"), vec![]),
            (&*format!("q=build&after={root}&from=ann"), vec!["build build build"]),
            // An invalid query finds nothing and causes no error.
            ("q=!!", vec![]),
            ("q=-", vec![]),
            ("q=%22%22", vec![]),
            ("q=%3A*%26%7C(", vec![]),
            ("q=%27+%5C", vec![]),
            ("q=build&from=%27)+%7C+%27+w1%27", vec![]),
        ] {
            assert_eq!(search_ids(&room.bob, query).await?, expected, "{query}");
        }
        anyhow::Ok(())
    };
    check().await?;
    indexed(&room.key, 4).await?;
    check().await?;
    for query in [
        "",
        "q=",
        "q=+",
        &*format!("q={}", "x".repeat(1025)),
        "q=%00",
        "q=x&from=%00",
        "q=x&channel=%00",
        "q=x&limit=0",
        "q=x&before=y",
    ] {
        room.bob.get(&format!("/v1/search?{query}")).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn conversations_are_found_by_participants_only() -> Result<()> {
    let room = room("search-dms").await?;
    let dm = room.ann.dm("bob", "the secret plan").await?.success()?;
    let group = room.ann.post("/v1/dm/group", json!({ "participants": ["bob"] })).await?.success()?;
    let path = format!("/v1/dm/{}", text(&group["id"]));
    room.ann.post(&format!("{path}/messages"), json!({ "text": "another secret" })).await?.success()?;
    let other = room.eve.dm("eve", "a secret of my own").await?.success()?;
    let check = |what: &'static str| {
        let room = &room;
        let (dm, other) = (&dm, &other);
        async move {
            let rows = room.bob.get("/v1/search?q=secret").await?.success()?;
            let rows = rows.as_array().cloned().unwrap_or_default();
            assert_eq!(rows.len(), 2, "{what}: {rows:?}");
            let row = rows.iter().find(|row| row["id"] == dm["id"]).cloned().unwrap_or_default();
            assert_eq!(row["conversation_id"], dm["conversation_id"]);
            assert!(text(&row["channel_id"]).starts_with("dmch_"), "{row}");
            let eves = room.eve.get("/v1/search?q=secret").await?.success()?;
            assert_eq!((eves.as_array().map(Vec::len), &eves[0]["id"]), (Some(1), &other["id"]), "{what}");
            let all = room.key.get("/v1/search?q=secret").await?.success()?;
            assert_eq!(all.as_array().map(Vec::len), Some(3), "{what}: the workspace's key sees all");
            anyhow::Ok(())
        }
    };
    check("at once").await?;
    indexed(&room.key, 3).await?;
    check("indexed").await?;
    // Former members find nothing, new members find earlier messages.
    room.ann.delete(&format!("{path}/participants/bob")).await?;
    assert_eq!(search_ids(&room.bob, "q=secret").await?, ["the secret plan"]);
    room.ann.post(&format!("{path}/participants"), json!({ "agent_name": "eve" })).await?.success()?;
    assert_eq!(search_ids(&room.eve, "q=another").await?, ["another secret"]);
    let stranger = Api::create_workspace(&shared().await.gateways[0], "search-stranger").await?;
    assert_eq!(search_ids(&stranger, "q=secret").await?, [""; 0], "another tenant's");
    Ok(())
}
