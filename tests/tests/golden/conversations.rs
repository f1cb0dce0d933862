//! Channels, messages, threads, reactions, read state, search, direct messages.

use anyhow::Result;
use relay_testkit::client::Api;

use crate::walk::{Walk, ask, ask_all, ask_with, text};

#[tokio::test]
async fn channels() -> Result<()> {
    let walk = Walk::new("channels").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    walk.agent("cyd").await?;
    let bob = walk.there(&bob);
    ask_all(
        &ada,
        &[
            r#"POST /v1/channels {"name":"plans","topic":"what to do","metadata":{"b":1,"a":2}}"#,
            r#"POST /v1/channels {"name":"plans"}"#,
            r##"POST /v1/channels {"name":"#Wrong Name"}"##,
            "POST /v1/channels {}",
            "GET /v1/channels",
            "GET /v1/channels/plans",
            "GET /v1/channels/%23plans",
            "GET /v1/channels/nowhere",
        ],
    )
    .await?;
    ask_all(
        &bob,
        &[
            "POST /v1/channels/plans/join",
            "POST /v1/channels/plans/join",
            "POST /v1/channels/nowhere/join",
            "POST /v1/channels/plans/mute",
            "POST /v1/channels/plans/mute",
            "GET /v1/channels/plans/members",
            "POST /v1/channels/plans/unmute",
            "POST /v1/channels/plans/leave",
            "POST /v1/channels/plans/leave",
            "POST /v1/channels/plans/mute",
            r#"POST /v1/channels/plans/invite {"agent_name":"cyd"}"#,
        ],
    )
    .await?;
    ask_all(
        &ada,
        &[
            r#"POST /v1/channels/plans/invite {"agent_name":"cyd"}"#,
            r#"POST /v1/channels/plans/invite {"agent":"cyd"}"#,
            r#"POST /v1/channels/plans/invite {"agent_name":"nobody"}"#,
            "POST /v1/channels/plans/invite {}",
            "GET /v1/channels/plans/members",
            "GET /v1/channels/plans/read-status",
            r#"PATCH /v1/channels/plans {"topic":null,"metadata":{"c":3}}"#,
            r#"PATCH /v1/channels/plans/topic {"topic":"another"}"#,
            "PATCH /v1/channels/plans/topic {}",
            r#"PATCH /v1/channels/nowhere {"topic":"x"}"#,
            "DELETE /v1/channels/general",
            "DELETE /v1/channels/nowhere",
            "DELETE /v1/channels/plans",
            "GET /v1/channels",
            "GET /v1/channels?include_archived=true",
            "GET /v1/channels/plans",
            "POST /v1/channels/plans/join",
            r#"POST /v1/channels/plans/messages {"text":"late"}"#,
        ],
    )
    .await?;
    ask_all(
        &walk.key,
        &[
            r#"POST /v1/channels {"name":"of-the-key"}"#,
            r#"POST /v1/channels/of-the-key/invite {"agent_name":"cyd"}"#,
            "POST /v1/channels/of-the-key/join",
            "GET /v1/channels/of-the-key",
        ],
    )
    .await?;
    walk.end()
}

/// The same key, the same key with another body, a key that is none.
async fn repeated(api: &Api, there: &Api, path: &str, body: &str) -> Result<()> {
    let key = [("idempotency-key", path.rsplit('/').next().unwrap_or_default())];
    ask_with(api, &format!("POST {path} {body}"), &key).await?;
    ask_with(there, &format!("POST {path} {body}"), &key).await?;
    ask_with(api, &format!("POST {path} {}", body.replace("once", "twice")), &key).await?;
    ask_with(api, &format!("POST {path} {body}"), &[("idempotency-key", "a key")]).await?;
    Ok(())
}

#[tokio::test]
async fn messages() -> Result<()> {
    let walk = Walk::new("messages").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let there = walk.there(&ada);
    let bob = walk.there(&bob);
    let first = ask(&ada, r#"POST /v1/channels/general/messages {"text":"first @bob","mode":"wait"}"#).await?;
    let first = text(&first, "/id")?;
    let second = ask(
        &bob,
        r#"POST /v1/channels/general/messages {"text":"second","mode":"steer","blocks":[{"type":"header","text":"h"},{"type":"divider"}],"data":{"b":1,"a":null},"content_type":"text/markdown"}"#,
    )
    .await?;
    let second = text(&second, "/id")?;
    repeated(&ada, &there, "/v1/channels/general/messages", r#"{"text":"once"}"#).await?;
    repeated(&ada, &there, &format!("/v1/messages/{first}/replies"), r#"{"text":"once, in a thread"}"#).await?;
    let reply = ask(&bob, &format!(r#"POST /v1/messages/{first}/replies {{"text":"a reply @ada"}}"#)).await?;
    let reply = text(&reply, "/id")?;
    ask_all(
        &ada,
        &[
            r#"POST /v1/channels/general/messages {"text":""}"#,
            "POST /v1/channels/general/messages {}",
            r#"POST /v1/channels/general/messages {"text":"x","mode":"shout"}"#,
            r#"POST /v1/channels/general/messages {"text":"x","from":"bob"}"#,
            r#"POST /v1/channels/general/messages {"text":"x","attachments":["7"]}"#,
            r#"POST /v1/channels/general/messages {"text":"x","ttl_ms":1}"#,
            r#"POST /v1/channels/nowhere/messages {"text":"x"}"#,
            r#"POST /v1/messages/7/replies {"text":"x"}"#,
            &format!(r#"POST /v1/messages/{reply}/replies {{"text":"a reply to a reply"}}"#),
            &format!(r#"POST /v1/messages/{first}/reactions {{"emoji":"tada"}}"#),
            &format!(r#"POST /v1/messages/{first}/reactions {{"emoji":"tada"}}"#),
            &format!(r#"POST /v1/messages/{first}/reactions {{"emoji":"a/b %"}}"#),
            &format!(r#"POST /v1/messages/{first}/reactions {{"emoji":""}}"#),
            r#"POST /v1/messages/7/reactions {"emoji":"tada"}"#,
            &format!("DELETE /v1/messages/{first}/reactions/a%2Fb%20%25"),
            &format!("DELETE /v1/messages/{first}/reactions/a%2Fb%20%25"),
        ],
    )
    .await?;
    ask_all(
        &bob,
        &[
            "GET /v1/inbox",
            "GET /v1/inbox?limit=1",
            &format!("POST /v1/messages/{first}/read"),
            &format!("POST /v1/messages/{first}/read"),
            "POST /v1/messages/7/read",
            "GET /v1/inbox",
            &format!("GET /v1/messages/{first}/readers"),
            &format!("GET /v1/messages/{first}/reactions"),
            "GET /v1/messages/7/reactions",
            "GET /v1/channels/general/read-status",
            "GET /v1/channels/general/messages",
            "GET /v1/channels/general/messages?limit=1",
            "GET /v1/channels/general/messages?limit=0",
            &format!("GET /v1/channels/general/messages?before={second}"),
            &format!("GET /v1/channels/general/messages?after={first}&limit=1"),
            "GET /v1/channels/nowhere/messages",
            &format!("GET /v1/messages/{first}"),
            &format!("GET /v1/messages/{second}"),
            "GET /v1/messages/7",
            "GET /v1/messages/seven",
            &format!("GET /v1/messages/{first}/replies"),
            &format!("GET /v1/messages/{reply}/replies"),
            "GET /v1/messages/7/replies",
            "GET /v1/search?q=second",
            "GET /v1/search?q=reply&channel=general&from=bob&limit=5",
            "GET /v1/search?q=nothing-like-it",
            "GET /v1/search",
            &format!(r#"PATCH /v1/messages/{second} {{"text":"second, corrected","blocks":null}}"#),
            &format!(r#"PATCH /v1/messages/{first} {{"text":"not mine"}}"#),
            &format!("PATCH /v1/messages/{second} {{}}"),
            &format!("GET /v1/messages/{second}"),
            "GET /v1/deliveries",
        ],
    )
    .await?;
    ask_all(
        &walk.key,
        &[
            r#"POST /v1/channels/general/messages {"text":"x"}"#,
            &format!(r#"POST /v1/messages/{first}/replies {{"text":"x"}}"#),
            &format!("GET /v1/messages/{first}"),
            &format!("GET /v1/messages/{first}/trace"),
            "GET /v1/messages/7/trace",
            "GET /v1/activity?limit=3",
            "GET /v1/console/messages",
            "GET /v1/console/messages?limit=1",
            "GET /v1/observe/mailboxes",
            "GET /v1/console/stats",
            "GET /v1/console/agents",
        ],
    )
    .await?;
    walk.end()
}

#[tokio::test]
async fn direct_messages() -> Result<()> {
    let walk = Walk::new("direct_messages").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let (_, cyd) = walk.agent("cyd").await?;
    let there = walk.there(&ada);
    let sent = ask(&ada, r#"POST /v1/dm {"to":"bob","text":"between us","mode":"wait"}"#).await?;
    let pair = text(&sent, "/conversation_id")?;
    repeated(&ada, &there, "/v1/dm", r#"{"to":"bob","text":"once"}"#).await?;
    repeated(&ada, &there, "/v1/dm/group", r#"{"participants":["bob"],"name":"once"}"#).await?;
    let made =
        ask(&ada, r#"POST /v1/dm/group {"participants":["bob","cyd"],"name":"three","text":"hello group"}"#).await?;
    let group = text(&made, "/id")?;
    let (pair, group) = (format!("/v1/dm/{pair}"), format!("/v1/dm/{group}"));
    repeated(&ada, &there, &format!("{pair}/messages"), r#"{"text":"once more"}"#).await?;
    ask_all(
        &ada,
        &[
            r#"POST /v1/dm {"to":"@bob","text":"x","mode":"steer"}"#,
            r#"POST /v1/dm {"to":"@self","text":"a note"}"#,
            r#"POST /v1/dm {"to":"nobody","text":"x"}"#,
            r#"POST /v1/dm {"address":"bob@direct","text":"by address"}"#,
            r#"POST /v1/dm {"address":"bob@nowhere","text":"x"}"#,
            r#"POST /v1/dm {"address":"bob","text":"x"}"#,
            r#"POST /v1/dm {"text":"x"}"#,
            r#"POST /v1/dm {"to":"bob"}"#,
            r#"POST /v1/dm/group {"participants":[]}"#,
            r#"POST /v1/dm/group {"participants":["nobody"]}"#,
            r#"POST /v1/dm/group {"participants":["bob"]}"#,
            &format!(r#"POST {group}/messages {{"text":"among three","mode":"steer"}}"#),
            r#"POST /v1/dm/7/messages {"text":"x"}"#,
            &format!(r#"POST {group}/participants {{"agent_name":"bob"}}"#),
            &format!(r#"POST {group}/participants {{"agent":"nobody"}}"#),
            &format!(r#"POST {pair}/participants {{"agent_name":"cyd"}}"#),
            "GET /v1/dm/conversations",
            &format!("GET {pair}/messages"),
            &format!("GET {group}/messages?limit=1"),
            "GET /v1/dm/7/messages",
            "GET /v1/search?q=among",
        ],
    )
    .await?;
    ask_all(
        &cyd,
        &[
            &format!("GET {pair}/messages"),
            &format!(r#"POST {pair}/messages {{"text":"x"}}"#),
            &format!("DELETE {group}/participants/cyd"),
            &format!("DELETE {group}/participants/cyd"),
            &format!("GET {group}/messages"),
        ],
    )
    .await?;
    ask_all(&ada, &[&format!(r#"POST {group}/participants {{"agent_name":"cyd"}}"#)]).await?;
    for client in ["@relaycast/python-sdk", "@relaycast/sdk-rust"] {
        let as_client = [("x-relaycast-origin-client", client)];
        for request in ["GET /v1/dm/conversations", "GET /v1/inbox", "GET /v1/deliveries"] {
            ask_with(&bob, request, &as_client).await?;
        }
    }
    let by_key = group.replace("/v1/dm/", "/v1/dm/conversations/");
    let every = ask(&walk.key, "GET /v1/dm/conversations/all?limit=1").await?;
    let next = every["cursor"]["next"].as_str().unwrap_or_default();
    ask_all(
        &walk.key,
        &[
            "GET /v1/dm/conversations/all",
            &format!("GET /v1/dm/conversations/all?limit=1&cursor={next}"),
            "GET /v1/dm/conversations/all?limit=0",
            &format!("GET {by_key}/messages"),
            &format!("GET {by_key}/messages?page=1&limit=1"),
            "GET /v1/dm/conversations/7/messages",
            r#"POST /v1/dm {"to":"bob","text":"x"}"#,
            r#"POST /v1/dm/group {"participants":["bob"]}"#,
        ],
    )
    .await?;
    walk.end()
}
