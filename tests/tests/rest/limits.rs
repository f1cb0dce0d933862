//! Bodies, names, pages, keys and frames at their limits: the documented error in the envelope, without any effect.

use anyhow::Result;
use relay_acceptance::raw::{Raw, is_failure};
use relay_testkit::client::{Api, Reply};
use relay_testkit::shared;
use serde_json::{Value, json};

const MIB: usize = 1024 * 1024;

async fn workspace(name: &str) -> Result<Api> {
    Api::create_workspace(shared().await.any_gateway(), name).await
}

/// Creates a workspace and returns an agent's client.
async fn agent(name: &str) -> Result<(Api, Api)> {
    let key = workspace(name).await?;
    let ann = key.register_agent("ann").await?;
    let as_ann = key.as_agent(&ann);
    Ok((key, as_ann))
}

fn refusal(reply: &Reply, status: u16, code: &str, what: &str) {
    assert!(is_failure(reply), "{what}: {} {}", reply.status, reply.body);
    assert_eq!((reply.status, reply.code()), (status, code), "{what}: {}", reply.body);
}

#[tokio::test]
async fn unknown_routes_answer_in_the_envelope() -> Result<()> {
    let (key, ann) = agent("unrouted").await?;
    let base = key.base();
    for path in [
        "/",
        "/v1",
        "/v1/",
        "/v2/agents",
        "/v1/agent/",
        "/v1/agents/ann/",
        "/v1/nope",
        "/v1/agents/ann/recover",
        "/v1/inbox/",
        "/v1/search/x",
        "/.well-known/agent-card.json",
        "/metrics",
    ] {
        refusal(&Raw::new("GET", format!("{base}{path}")).bearer(key.token()).send().await?, 404, "not_found", path);
    }
    // Newer clients fall back when these answer `not_found`.
    for path in ["/v1/agents/ann/recover", "/v1/agents/ann/takeover", "/v1/credentials/upgrade"] {
        refusal(&key.post(path, json!({})).await?, 404, "not_found", path);
    }
    for (method, path) in [
        ("PUT", "/v1/agents"),
        ("DELETE", "/v1/agents"),
        ("GET", "/v1/dm"),
        ("PUT", "/v1/messages/1"),
        ("TRACE", "/v1/agent"),
        ("PROPFIND", "/v1/agent"),
        ("GET", "/v1/deliveries/del_1_1/ack"),
        ("POST", "/health"),
    ] {
        let reply = Raw::new(method, format!("{base}{path}")).bearer(ann.token()).send().await?;
        refusal(&reply, 405, "method_not_allowed", &format!("{method} {path}"));
    }
    // A base URL with a trailing slash, joined with a path with a leading slash.
    assert_eq!(Raw::new("GET", format!("{base}//v1/agent")).bearer(ann.token()).send().await?.status, 200);
    // HEAD is GET without a body.
    let head = Raw::new("HEAD", format!("{base}/v1/agent")).bearer(ann.token()).send().await?;
    assert_eq!((head.status, &head.body), (200, &Value::Null));
    for nonsense in
        ["", "00-", "00-0-0-00", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", &"0".repeat(4000)]
    {
        let traced = Raw::new("GET", format!("{base}/v1/agent")).bearer(ann.token()).header("traceparent", nonsense);
        assert_eq!(traced.send().await?.status, 200, "a traceparent is a hint: {nonsense}");
    }
    let echoed = Raw::new("GET", format!("{base}/v1/nope")).header("x-request-id", "req-7").send().await?;
    assert_eq!(echoed.headers["x-request-id"], "req-7");
    Ok(())
}

#[tokio::test]
async fn a_malformed_body_is_refused_at_every_route() -> Result<()> {
    let (key, ann) = agent("bad-bodies").await?;
    key.register_agent("bob").await?;
    ann.create_channel("room").await?;
    let message = ann.post_message("room", "x").await?.success()?["id"].as_str().unwrap_or_default().to_owned();
    let group = ann.post("/v1/dm/group", json!({ "participants": ["bob"] })).await?.success()?;
    let group = group["id"].as_str().unwrap_or_default();
    let delivery = format!("del_{message}_1");
    let (reply, fail, defer) = (
        format!("/v1/messages/{message}/replies"),
        format!("/v1/deliveries/{delivery}/fail"),
        format!("/v1/deliveries/{delivery}/defer"),
    );
    let (to_group, participants) = (format!("/v1/dm/{group}/messages"), format!("/v1/dm/{group}/participants"));
    // Route, its token, and bodies of a wrong type.
    let routes: Vec<(&str, &str, &Api, Vec<Value>)> = vec![
        (
            "POST",
            "/v1/workspaces",
            &key,
            vec![
                json!({}),
                json!({ "name": 1 }),
                json!({ "name": "" }),
                json!({ "name": "w", "metadata": [] }),
                json!({ "name": "w", "expires_in_seconds": 1 }),
            ],
        ),
        ("PATCH", "/v1/workspace", &key, vec![json!({ "name": 1 }), json!({ "metadata": "x" })]),
        (
            "POST",
            "/v1/agents",
            &key,
            vec![
                json!({}),
                json!({ "name": null }),
                json!({ "name": "x", "type": "robot" }),
                json!({ "name": "x", "metadata": [1] }),
                json!({ "name": "x", "skills": {} }),
                json!({ "name": " " }),
                json!({ "name": "a\nb" }),
            ],
        ),
        (
            "PATCH",
            "/v1/agents/ann",
            &key,
            vec![
                json!({ "status": "dancing" }),
                json!({ "status": 1 }),
                json!({ "metadata": 3 }),
                json!({ "persona": {} }),
            ],
        ),
        (
            "POST",
            "/v1/channels",
            &ann,
            vec![
                json!({}),
                json!({ "name": 1 }),
                json!({ "name": "x", "topic": 1 }),
                json!({ "name": "x", "metadata": "m" }),
            ],
        ),
        ("PATCH", "/v1/channels/room", &ann, vec![json!({ "topic": 7 })]),
        ("PATCH", "/v1/channels/room/topic", &ann, vec![json!({}), json!({ "topic": null })]),
        ("POST", "/v1/channels/room/invite", &ann, vec![json!({}), json!({ "agent_name": ["bob"] })]),
        (
            "POST",
            "/v1/channels/room/messages",
            &ann,
            vec![
                json!({}),
                json!({ "text": "" }),
                json!({ "text": 1 }),
                json!({ "text": ["a"] }),
                json!({ "text": "x", "mode": "shout" }),
                json!({ "text": "x", "blocks": {} }),
                json!({ "text": "x", "data": [] }),
                json!({ "text": "x", "attachments": "f" }),
            ],
        ),
        ("POST", &reply, &ann, vec![json!({}), json!({ "text": "" }), json!({ "text": null })]),
        (
            "POST",
            "/v1/dm",
            &ann,
            vec![
                json!({}),
                json!({ "to": "bob" }),
                json!({ "text": "x" }),
                json!({ "to": 1, "text": "x" }),
                json!({ "to": "", "text": "x" }),
                json!({ "to": "bob", "text": "" }),
            ],
        ),
        (
            "POST",
            "/v1/dm/group",
            &ann,
            vec![
                json!({}),
                json!({ "participants": "bob" }),
                json!({ "participants": [] }),
                json!({ "participants": [1] }),
            ],
        ),
        ("POST", &to_group, &ann, vec![json!({}), json!({ "text": "" })]),
        ("POST", &participants, &ann, vec![json!({}), json!({ "agent_name": 1 })]),
        (
            "POST",
            "/v1/nodes",
            &key,
            vec![
                json!({}),
                json!({ "name": 1 }),
                json!({ "name": "n", "max_agents": -1 }),
                json!({ "name": "n", "max_agents": "many" }),
                json!({ "name": "n", "tags": "t" }),
                json!({ "name": "n", "capabilities": [1] }),
                json!({ "name": "n", "role": "king" }),
            ],
        ),
        ("POST", &fail, &ann, vec![json!({ "error": 1 }), json!({ "retryable": "yes" })]),
        (
            "POST",
            &defer,
            &ann,
            vec![
                json!({}),
                json!({ "available_at": "tomorrow" }),
                json!({ "available_at": 1 }),
                json!({ "available_at": "2030-01-01T00:00:00" }),
            ],
        ),
    ];
    let before = ann.get("/v1/channels/room/messages").await?.success()?;
    for (method, path, api, bodies) in routes {
        let send =
            |body: Vec<u8>| Raw::new(method, format!("{}{path}", api.base())).bearer(api.token()).json(body).send();
        for body in bodies {
            let reply = send(body.to_string().into_bytes()).await?;
            refusal(&reply, 400, "invalid_request", &format!("{method} {path} {body}"));
        }
        for body in [&b"[]"[..], b"[{\"text\":\"x\"}]", b"\"text\"", b"17", b"null", b"true"] {
            let what = format!("{method} {path} {}", String::from_utf8_lossy(body));
            refusal(&send(body.to_vec()).await?, 400, "invalid_request", &what);
        }
        for body in [
            &b"{"[..],
            b"{\"text\":\"x\",}",
            b"text=x",
            b"{\"text\":\"\xff\xfe\"}",
            b"{'text':'x'}",
            b"{} {}",
            b"\xef\xbb\xbf{}",
        ] {
            let what = format!("{method} {path} {}", String::from_utf8_lossy(body));
            refusal(&send(body.to_vec()).await?, 400, "invalid_json", &what);
        }
        let nul = send(br#"{"text":"a\u0000b","name":"a\u0000b"}"#.to_vec()).await?;
        refusal(&nul, 400, "invalid_request", &format!("{method} {path} with U+0000"));
        for kind in
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp"]
        {
            let reply =
                Raw::new(method, format!("{}{path}", api.base())).bearer(api.token()).header("content-type", kind);
            let reply = reply.body(br#"{"text":"x","name":"x"}"#.to_vec()).send().await?;
            refusal(&reply, 415, "unsupported_media_type", &format!("{method} {path} {kind}"));
        }
        let reply = send(vec![b' '; MIB + 1]).await?;
        refusal(&reply, 413, "payload_too_large", &format!("{method} {path} with more than 1 MiB"));
    }
    assert_eq!(ann.get("/v1/channels/room/messages").await?.success()?, before, "nothing was committed");
    // Routes without required fields accept no body, an empty one, and one with unknown fields.
    for body in [&b""[..], b"{}", b"{\"x\":1}"] {
        for path in [
            "/v1/channels/room/join",
            "/v1/channels/room/mute",
            "/v1/channels/room/unmute",
            "/v1/agents/heartbeat",
            "/v1/agent/node-token",
        ] {
            let reply = Raw::new("POST", format!("{}{path}", ann.base())).bearer(ann.token()).body(body).send().await?;
            assert_eq!(reply.status, 200, "{path} {}", reply.body);
            assert!(reply.body.get("data").is_some(), "{path}: strict clients need data");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_body_of_exactly_1_mib_is_read() -> Result<()> {
    let (key, ann) = agent("one-mib").await?;
    let mut body = br#"{"text":"small","padding":""#.to_vec();
    body.resize(MIB - 2, b'x');
    body.extend_from_slice(b"\"}");
    let url = format!("{}/v1/channels/general/messages", key.base());
    let taken = Raw::new("POST", &url).bearer(ann.token()).json(body.clone()).send().await?;
    assert_eq!(taken.status, 201, "{}", taken.body);
    body.push(b' ');
    refusal(
        &Raw::new("POST", &url).bearer(ann.token()).json(body).send().await?,
        413,
        "payload_too_large",
        "one byte more",
    );
    assert_eq!(ann.get("/v1/channels/general/messages").await?.data().as_array().map(Vec::len), Some(1));
    Ok(())
}

#[tokio::test]
async fn names_and_texts_have_documented_length_limits() -> Result<()> {
    let (key, ann) = agent("lengths").await?;
    key.register_agent("bob").await?;
    let x = |count: usize| "x".repeat(count);
    let longest = [
        ("/v1/agents", &key, "name", 128, json!({})),
        ("/v1/agents", &key, "persona", 16 * 1024, json!({ "name": "persona" })),
        ("/v1/channels", &ann, "name", 80, json!({})),
        ("/v1/channels", &ann, "topic", 1024, json!({ "name": "topic" })),
        ("/v1/channels/general/messages", &ann, "text", 256 * 1024, json!({})),
        ("/v1/channels/general/messages", &ann, "content_type", 128, json!({ "text": "t" })),
        ("/v1/dm", &ann, "text", 256 * 1024, json!({ "to": "bob" })),
        ("/v1/dm/group", &ann, "name", 256, json!({ "participants": ["bob"] })),
        ("/v1/nodes", &key, "name", 128, json!({})),
        ("/v1/nodes", &key, "node_id", 128, json!({ "name": "with-id" })),
        ("/v1/nodes", &key, "version", 2048, json!({ "name": "with-version" })),
        ("/v1/nodes", &key, "machine_id", 2048, json!({ "name": "with-machine" })),
    ];
    for (path, api, field, limit, rest) in longest {
        let body = |text: String| {
            let mut body = rest.clone();
            body[field] = json!(text);
            body
        };
        let over = api.post(path, body(x(limit + 1))).await?;
        assert!(is_failure(&over) && over.status == 400, "{path} {field}: {} {}", over.status, over.body);
        let codes = ["invalid_request", "invalid_channel_name", "invalid_node_name"];
        assert!(codes.contains(&over.code()), "{path} {field}: {}", over.body);
        let most = api.post(path, body(x(limit))).await?;
        assert_eq!(most.status, 201, "{path} {field} at its limit: {}", most.body);
    }
    let metadata = |bytes: usize| json!({ "k": x(bytes - 8) });
    for (path, api, field, rest) in [
        ("/v1/agents", &key, "metadata", json!({ "name": "meta" })),
        ("/v1/agents", &key, "capabilities", json!({ "name": "meta" })),
        ("/v1/channels", &ann, "metadata", json!({ "name": "meta" })),
        ("/v1/channels/general/messages", &ann, "data", json!({ "text": "t" })),
    ] {
        let mut body = rest.clone();
        body[field] = metadata(64 * 1024 + 1);
        refusal(&api.post(path, body).await?, 400, "invalid_request", &format!("{path} {field}"));
    }
    for name in ["Upper", "with space", "-dash", "dot.", "ünï", ""] {
        refusal(&ann.post("/v1/channels", json!({ "name": name })).await?, 400, "invalid_channel_name", name);
    }
    // Metadata that grows by merging has the same limit.
    key.patch("/v1/agents/bob", json!({ "metadata": { "a": x(40_000) } })).await?.success()?;
    let grown = key.patch("/v1/agents/bob", json!({ "metadata": { "b": x(40_000) } })).await?;
    refusal(&grown, 400, "invalid_request", "merged metadata");
    // Path parameters may have any length and any bytes.
    for name in
        [x(7000), "%ff%fe".into(), "%2e%2e".into(), "a%2Fb".into(), "%F0%9F%98%80".into(), "'%20OR%201=1--".into()]
    {
        for path in ["/v1/agents/", "/v1/channels/", "/v1/messages/", "/v1/nodes/"] {
            let reply = key.get(&format!("{path}{name}")).await?;
            assert!(
                is_failure(&reply) && [400, 404].contains(&reply.status),
                "{path}: {} {}",
                reply.status,
                reply.body
            );
        }
    }
    for path in ["/v1/agents/a%00b", "/v1/workspaces/by-name/%00", "/v1/agents?status=%00", "/v1/nodes?name=%00"] {
        refusal(&key.get(path).await?, 400, "invalid_request", path);
    }
    Ok(())
}

#[tokio::test]
async fn an_invalid_page_size_is_refused_and_a_large_one_clamped() -> Result<()> {
    let (key, ann) = agent("pages").await?;
    let bob = key.register_agent("bob").await?;
    let dm = ann.dm("bob", "x").await?.success()?;
    let conversation = dm["conversation_id"].as_str().unwrap_or_default();
    let message = ann.post_message("general", "x").await?.success()?;
    let message = message["id"].as_str().unwrap_or_default();
    let lists = [
        ("/v1/channels/general/messages".to_owned(), true),
        (format!("/v1/messages/{message}/replies"), true),
        (format!("/v1/dm/{conversation}/messages"), true),
        ("/v1/deliveries".to_owned(), false),
    ];
    for (path, has_cursors) in lists {
        for bad in ["0", "-1", "1.5", "x", "", "%20", "1e3", "0x10"] {
            let reply = key.as_agent(&bob).get(&format!("{path}?limit={bad}")).await?;
            refusal(&reply, 400, "invalid_request", &format!("{path} limit {bad}"));
        }
        for good in ["1", "100", "100000", "99999999999999999999999"] {
            let reply = key.as_agent(&bob).get(&format!("{path}?limit={good}")).await?;
            assert_eq!(reply.status, 200, "{path} limit {good}: {}", reply.body);
        }
        refusal(&key.as_agent(&bob).get(&format!("{path}?limit=1&limit=2")).await?, 400, "invalid_request", "twice");
        for cursor in if has_cursors { &["before", "after"][..] } else { &[] } {
            for bad in ["x", "-1", "1.0", "9223372036854775808", "%27"] {
                let reply = key.as_agent(&bob).get(&format!("{path}?{cursor}={bad}")).await?;
                refusal(&reply, 400, "invalid_request", &format!("{path} {cursor} {bad}"));
            }
        }
    }
    let as_bob = key.as_agent(&bob);
    refusal(&as_bob.get("/v1/deliveries?status=nonsense").await?, 400, "invalid_request", "status");
    refusal(&key.get("/v1/agents?status=nonsense").await?, 400, "invalid_request", "status");
    refusal(&key.get("/v1/nodes?status=nonsense").await?, 400, "invalid_request", "status");
    Ok(())
}

#[tokio::test]
async fn an_invalid_idempotency_key_is_refused_without_effect() -> Result<()> {
    let (key, ann) = agent("bad-keys").await?;
    key.register_agent("bob").await?;
    ann.dm("bob", "first").await?.success()?;
    for path in ["/v1/channels/general/messages", "/v1/dm", "/v1/dm/group"] {
        let body = json!({ "text": "x", "to": "bob", "participants": ["bob"] });
        for header in ["idempotency-key", "x-idempotency-key"] {
            for bad in [&b""[..], b"   ", b"a b", "\u{e4}".as_bytes(), b"\xff", &[b'k'; 256], b"a\tb"] {
                let request = Raw::new("POST", format!("{}{path}", key.base())).bearer(ann.token()).header(header, bad);
                let reply = request.json(body.to_string()).send().await?;
                refusal(&reply, 400, "invalid_idempotency_key", &format!("{path} {header} {bad:?}"));
            }
        }
    }
    let taken = Raw::new("POST", format!("{}/v1/dm", key.base())).bearer(ann.token());
    let taken =
        taken.header("idempotency-key", format!(" {} ", "k".repeat(255))).json(r#"{"to":"bob","text":"second"}"#);
    assert_eq!(taken.send().await?.status, 201);
    assert_eq!(ann.get("/v1/channels/general/messages").await?.success()?, json!([]));
    assert_eq!(ann.get("/v1/dm/conversations").await?.data().as_array().map(Vec::len), Some(1));
    Ok(())
}
