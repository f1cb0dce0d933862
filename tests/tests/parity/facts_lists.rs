//! Limits and filters of lists that clients rely on being refused or honoured.

use anyhow::Result;
use relay_acceptance::room::{Room, rows, text};
use serde_json::json;

#[tokio::test]
async fn a_limit_of_conversations_is_honoured_and_refused_above_100() -> Result<()> {
    let room = Room::new("conversation-limit").await?;
    for name in ["bob", "carol"] {
        if name != "bob" {
            room.key.register_agent(name).await?;
        }
        room.ann.dm(name, "hello").await?.success()?;
    }
    let listed = room.ann.get("/v1/dm/conversations").await?.success()?;
    assert_eq!(rows(&listed).len(), 2);
    for gateway in [room.ann.base(), room.bob.base()] {
        let first = room.ann.at(gateway).get("/v1/dm/conversations?limit=1").await?.success()?;
        assert_eq!(rows(&first).len(), 1);
        assert_eq!(text(&first[0]["id"]), text(&listed[0]["id"]), "the most recently active one");
    }
    room.ann.get("/v1/dm/conversations?limit=100").await?.success()?;
    for limit in ["0", "101", "-1", "many", ""] {
        let path = format!("/v1/dm/conversations?limit={limit}");
        room.ann.at(room.bob.base()).get(&path).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_page_of_events_above_500_is_refused() -> Result<()> {
    let room = Room::new("event-limit").await?;
    room.key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    for limit in ["501", "0"] {
        let path = format!("/v1/workspace/events?since=0&limit={limit}");
        room.key.at(room.bob.base()).get(&path).await?.refused(400, "invalid_request")?;
    }
    room.ann.get("/v1/agents/bob/events?limit=500").await?.success()?;
    let path = "/v1/agents/bob/events?limit=501";
    room.ann.at(room.bob.base()).get(path).await?.refused(400, "invalid_request")?;
    Ok(())
}

#[tokio::test]
async fn agents_of_statuses_that_are_not_kept_are_none() -> Result<()> {
    let room = Room::new("status-words").await?;
    for word in ["released", "unknown"] {
        for gateway in [room.ann.base(), room.bob.base()] {
            let listed = room.key.at(gateway).get(&format!("/v1/agents?status={word}")).await?.success()?;
            assert_eq!(listed, json!([]), "{word}");
        }
    }
    room.key.get("/v1/agents?status=sleepy").await?.refused(400, "invalid_request")?;
    Ok(())
}
