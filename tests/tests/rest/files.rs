//! Files: declaration, upload and download through signed URLs, attachment and deletion.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_acceptance::raw::Raw;
use relay_testkit::client::{Agent, Api, NodeSocket, Reply};
use relay_testkit::{shared, wait};
use reqwest::Response;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
/// The loop that removes bytes runs every ten seconds.
const REMOVED_WITHIN: Duration = Duration::from_secs(60);

struct FileScene {
    key: Api,
    ann: Api,
    bob: Agent,
}

async fn tenant(name: &str) -> Result<FileScene> {
    let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let ann = key.as_agent(&ann);
    Ok(FileScene { key, ann, bob })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the next delivery on this socket, skipping other frames.
async fn next_deliver(socket: &mut NodeSocket) -> Result<Value> {
    loop {
        let frame = socket.next_frame(SOON).await?;
        if frame["type"] == "deliver" {
            return Ok(frame);
        }
    }
}

async fn declare(api: &Api, filename: &str, content_type: &str, size: usize) -> Result<Value> {
    let body = json!({ "filename": filename, "content_type": content_type, "size_bytes": size });
    let reply = api.post("/v1/files/upload", body).await?;
    assert_eq!(reply.status, 201, "{}", reply.body);
    reply.success()
}

async fn put(url: &str, bytes: impl Into<Vec<u8>>) -> Result<Reply> {
    Raw::new("PUT", url).body(bytes).send().await
}

async fn download(url: &str) -> Result<Response> {
    Ok(relay_testkit::http::client().build()?.get(url).send().await?)
}

/// Declares, uploads and completes a file.
async fn file(api: &Api, filename: &str, content_type: &str, bytes: &[u8]) -> Result<Value> {
    let declared = declare(api, filename, content_type, bytes.len()).await?;
    let uploaded = put(text(&declared["upload_url"]), bytes).await?;
    assert_eq!(uploaded.status, 200, "{}", uploaded.body);
    api.post_empty(&format!("/v1/files/{}/complete", text(&declared["id"]))).await?.success()
}

const FIELDS: [&str; 11] = [
    "id",
    "file_id",
    "filename",
    "content_type",
    "size_bytes",
    "size",
    "status",
    "uploaded_by",
    "url",
    "download_url",
    "created_at",
];

fn has_all_fields(file: &Value) {
    for field in FIELDS {
        assert!(file.get(field).is_some(), "{field} missing in {file}");
    }
    assert_eq!((&file["id"], &file["size"]), (&file["file_id"], &file["size_bytes"]));
    assert!(file["url"].is_string() && file["uploaded_by"].is_string());
}

#[tokio::test]
async fn a_file_uploaded_at_one_gateway_is_downloaded_at_the_other() -> Result<()> {
    let FileScene { key, ann, bob } = tenant("files").await?;
    let gateways = &shared().await.gateways;
    let mut watching = key.as_agent(&bob).at(&gateways[1]).direct_socket().await?;
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    // The size under its other name, which one client uses.
    let body = json!({ "filename": "Bericht ü.pdf", "content_type": "application/pdf", "size": bytes.len() });
    let declared = ann.post("/v1/files/upload", body).await?.success()?;
    has_all_fields(&declared);
    assert!(declared["expires_at"].is_string());
    assert_eq!(
        (text(&declared["status"]), &declared["download_url"], text(&declared["url"])),
        ("pending", &Value::Null, "")
    );
    assert_eq!(text(&declared["uploaded_by"]), "ann");
    let upload_url = text(&declared["upload_url"]);
    assert!(upload_url.starts_with(&format!("{}/_relayfiles?token=", gateways[0])), "{upload_url}");
    let path = format!("/v1/files/{}", text(&declared["id"]));
    let complete = format!("{path}/complete");
    ann.post_empty(&complete).await?.refused(409, "upload_incomplete")?;

    // Every gateway accepts every URL.
    let elsewhere = upload_url.replacen(&gateways[0], &gateways[1], 1);
    let uploaded = put(&elsewhere, bytes.clone()).await?;
    assert_eq!((uploaded.status, uploaded.data()["size_bytes"].as_u64()), (200, Some(3_000_000)), "{}", uploaded.body);
    assert_eq!(key.get(&path).await?.success()?["status"], "pending", "not before it is completed");
    let completed = ann.post_empty(&complete).await?.success()?;
    has_all_fields(&completed);
    assert_eq!(ann.post_empty(&complete).await?.success()?["id"], completed["id"], "again is fine");
    let notice = watching.next_frame(SOON).await?;
    assert_eq!((text(&notice["type"]), text(&notice["event"])), ("context.update", "file.uploaded"), "{notice}");
    let reported = &notice["data"]["file"];
    assert_eq!((&reported["file_id"], text(&reported["uploaded_by"])), (&declared["id"], "ann"));

    let seen = key.as_agent(&bob).at(&gateways[1]).get(&path).await?.success()?;
    has_all_fields(&seen);
    assert_eq!((text(&seen["status"]), seen["size_bytes"].as_u64()), ("complete", Some(3_000_000)));
    assert_eq!(seen["url"], seen["download_url"]);
    let answer = download(text(&seen["download_url"])).await?;
    let header = |name: &str| answer.headers()[name].to_str().unwrap_or_default().to_owned();
    assert_eq!(answer.status(), 200);
    assert_eq!((header("content-type"), header("content-length")), ("application/pdf".into(), "3000000".into()));
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert_eq!(
        header("content-disposition"),
        "attachment; filename=\"Bericht _.pdf\"; filename*=UTF-8''Bericht%20%C3%BC.pdf"
    );
    assert!(header("content-security-policy").contains("sandbox"));
    assert!(answer.bytes().await? == bytes, "the same bytes");
    // A complete file is immutable.
    put(upload_url, bytes).await?.refused(403, "forbidden")?;
    Ok(())
}

#[tokio::test]
async fn an_upload_has_exactly_the_declared_size() -> Result<()> {
    let FileScene { ann, .. } = tenant("sizes").await?;
    let declared = declare(&ann, "a.txt", "text/plain", 10).await?;
    let url = text(&declared["upload_url"]);
    for length in [0, 1, 9, 11, 5000] {
        put(url, vec![b'x'; length]).await?.refused(400, "invalid_request")?;
    }
    // The same without a declared length.
    let client = relay_testkit::http::client().build()?;
    for length in [9_usize, 11] {
        let pieces = (0..length).map(|_| Ok::<_, std::io::Error>(vec![b'x']));
        let body = reqwest::Body::wrap_stream(futures::stream::iter(pieces));
        assert_eq!(client.put(url).body(body).send().await?.status(), 400, "{length}");
    }
    let complete = format!("/v1/files/{}/complete", text(&declared["id"]));
    ann.post_empty(&complete).await?.refused(409, "upload_incomplete")?;
    // Until it is complete the last upload counts.
    assert_eq!(put(url, *b"0123456789").await?.status, 200);
    assert_eq!(put(url, *b"abcdefghij").await?.status, 200);
    let completed = ann.post_empty(&complete).await?.success()?;
    assert_eq!(download(text(&completed["download_url"])).await?.text().await?, "abcdefghij");
    Ok(())
}

#[tokio::test]
async fn an_invalid_file_is_refused_when_it_is_declared() -> Result<()> {
    let FileScene { key, ann, .. } = tenant("refused-files").await?;
    let good = json!({ "filename": "a", "content_type": "text/plain", "size_bytes": 1 });
    for (field, value, status, code) in [
        ("size_bytes", json!(0), 400, "invalid_request"),
        ("size_bytes", json!(-1), 400, "invalid_request"),
        ("size_bytes", json!("1"), 400, "invalid_request"),
        ("size_bytes", json!(null), 400, "invalid_request"),
        ("size_bytes", json!(1_i64 << 40), 413, "payload_too_large"),
        ("filename", json!(""), 400, "invalid_request"),
        ("filename", json!("a\nb"), 400, "invalid_request"),
        ("filename", json!("x".repeat(256)), 400, "invalid_request"),
        ("content_type", json!("text"), 400, "invalid_request"),
        ("content_type", json!("text/plain\r\nx: y"), 400, "invalid_request"),
        ("content_type", json!(7), 400, "invalid_request"),
    ] {
        let mut body = good.clone();
        body[field] = value;
        ann.post("/v1/files/upload", body).await?.refused(status, code)?;
    }
    key.post("/v1/files/upload", good).await?.refused(401, "unauthorized")?;
    for id in ["0", "7", "x", "-1", "243812004871278592"] {
        ann.get(&format!("/v1/files/{id}")).await?.refused(404, "file_not_found")?;
        ann.post_empty(&format!("/v1/files/{id}/complete")).await?.refused(404, "file_not_found")?;
        ann.delete(&format!("/v1/files/{id}")).await?.refused(404, "file_not_found")?;
    }
    ann.get("/v1/files?uploaded_by=x").await?.refused(400, "invalid_request")?;
    ann.get("/v1/files?limit=0").await?.refused(400, "invalid_request")?;
    Ok(())
}

#[tokio::test]
async fn a_transfer_url_is_valid_for_one_file_and_one_direction() -> Result<()> {
    let FileScene { ann, .. } = tenant("addresses").await?;
    let base = shared().await.any_gateway();
    let complete = file(&ann, "a.txt", "text/plain", b"hello").await?;
    let pending = declare(&ann, "b.txt", "text/plain", 5).await?;
    let (down, up) = (text(&complete["download_url"]), text(&pending["upload_url"]));
    put(down, *b"hello").await?.refused(403, "forbidden")?;
    assert_eq!(download(up).await?.status(), 403);
    let token = down.split_once("token=").context("a token")?.1;
    let mut changed = token.to_owned();
    let last = changed.pop().context("a token")?;
    changed.push(if last == 'A' { 'B' } else { 'A' });
    for token in ["", "x", "a.b.c", &changed, &token[..token.len() - 1], &format!("{token}.x"), ann.token()] {
        let answer = download(&format!("{base}/_relayfiles?token={token}")).await?;
        assert_eq!(answer.status(), 403, "{token}");
        put(&format!("{base}/_relayfiles?token={token}"), *b"hello").await?.refused(403, "forbidden")?;
    }
    assert_eq!(download(&format!("{base}/_relayfiles")).await?.status(), 403);
    Ok(())
}

#[tokio::test]
async fn only_the_owner_completes_and_deletes_a_file() -> Result<()> {
    let FileScene { key, ann, bob } = tenant("owners").await?;
    let as_bob = key.as_agent(&bob);
    let declared = declare(&ann, "../../etc/passwd", "text/plain", 5).await?;
    assert_eq!(put(text(&declared["upload_url"]), *b"hello").await?.status, 200);
    let path = format!("/v1/files/{}", text(&declared["id"]));
    as_bob.post_empty(&format!("{path}/complete")).await?.refused(404, "file_not_found")?;
    let completed = ann.post_empty(&format!("{path}/complete")).await?.success()?;
    assert_eq!(completed["filename"], "../../etc/passwd", "kept as given, used for nothing");
    let of_bob = file(&as_bob, "b", "text/plain", b"b").await?;

    let ids = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().map(|file| text(&file["id"]).to_owned()).collect()
    };
    let (first, second) = (text(&completed["id"]).to_owned(), text(&of_bob["id"]).to_owned());
    assert_eq!(ids(&key.get("/v1/files").await?.success()?), [second.clone(), first.clone()], "newest first");
    assert_eq!(ids(&key.get("/v1/files?limit=1").await?.success()?), std::slice::from_ref(&second));
    let of_ann = ann.get("/v1/agent").await?.success()?;
    let query = format!("/v1/files?uploaded_by={}", text(&of_ann["id"]));
    assert_eq!(ids(&as_bob.get(&query).await?.success()?), std::slice::from_ref(&first));

    as_bob.delete(&path).await?.refused(403, "forbidden")?;
    let url = text(&completed["download_url"]).to_owned();
    assert_eq!(download(&url).await?.text().await?, "hello");
    assert_eq!(ann.delete(&path).await?.status, 204);
    assert_eq!(download(&url).await?.status(), 404, "an address does not outlive its file");
    ann.delete(&path).await?.refused(404, "file_not_found")?;
    ann.post_empty(&format!("{path}/complete")).await?.refused(404, "file_not_found")?;
    let gone = key.get(&path).await?.success()?;
    assert_eq!((text(&gone["status"]), &gone["download_url"]), ("deleted", &Value::Null));
    assert_eq!(ids(&key.get("/v1/files").await?.success()?), [second]);

    // The worker removes the bytes before it deletes the object's row.
    let pool = sqlx::PgPool::connect(&shared().await.database_url).await?;
    let id: i64 = first.parse()?;
    wait::until("the bytes to be removed", REMOVED_WITHIN, || async {
        let left: Result<i64, _> =
            sqlx::query_scalar("SELECT count(*) FROM file_objects WHERE file_id = $1").bind(id).fetch_one(&pool).await;
        left.is_ok_and(|left| left == 0)
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn messages_carry_complete_files_of_their_workspace() -> Result<()> {
    let FileScene { key, ann, bob } = tenant("attachments").await?;
    let one = file(&ann, "one.txt", "text/plain", b"1").await?;
    let two = file(&key.as_agent(&bob), "two.png", "image/png", b"22").await?;
    let ids = [text(&two["id"]), text(&one["id"])];
    let shown = json!([
        { "file_id": ids[0], "filename": "two.png", "content_type": "image/png", "size_bytes": 2 },
        { "file_id": ids[1], "filename": "one.txt", "content_type": "text/plain", "size_bytes": 1 },
    ]);
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    let with_files = json!({ "text": "see", "attachments": ids });
    let posted = ann.post("/v1/channels/general/messages", with_files.clone()).await?.success()?;
    assert_eq!((&posted["attachments"], &posted["has_attachments"]), (&shown, &json!(true)));
    let listed = key.get("/v1/channels/general/messages").await?.success()?;
    assert_eq!(listed[0]["attachments"], shown);
    let frame = next_deliver(&mut socket).await?;
    assert_eq!(
        (&frame["payload"]["data"]["attachments"], &frame["payload"]["data"]["has_attachments"]),
        (&shown, &json!(true))
    );

    let dm = json!({ "to": "bob", "text": "see", "attachments": ids });
    let sent = ann.post("/v1/dm", dm).await?.success()?;
    assert_eq!((&sent["attachments"], &sent["message"]["attachments"]), (&shown, &shown));
    let frame = next_deliver(&mut socket).await?;
    assert_eq!(frame["payload"]["data"]["message"]["attachments"], shown);
    let conversation = format!("/v1/dm/{}/messages", text(&sent["conversation_id"]));
    assert_eq!(ann.post(&conversation, with_files).await?.success()?["attachments"], shown);
    assert_eq!(ann.get(&conversation).await?.success()?[0]["attachments"], shown);

    let pending = declare(&ann, "p", "text/plain", 1).await?;
    let other = tenant("attachments-elsewhere").await?;
    let foreign = file(&other.ann, "f", "text/plain", b"f").await?;
    let gone = file(&ann, "g", "text/plain", b"g").await?;
    assert_eq!(ann.delete(&format!("/v1/files/{}", text(&gone["id"]))).await?.status, 204);
    let rich = json!({ "type": "file", "url": "x" }).to_string();
    let many: Vec<String> = (0..21).map(|n| n.to_string()).collect();
    for attachments in [
        vec!["7"],
        vec!["nonsense"],
        vec![&*rich],
        vec![ids[0], ids[0]],
        vec![ids[0], text(&pending["id"])],
        vec![text(&foreign["id"])],
        vec![text(&gone["id"])],
        many.iter().map(String::as_str).collect(),
    ] {
        let body = json!({ "text": "no", "to": "bob", "attachments": attachments });
        for path in ["/v1/channels/general/messages", "/v1/dm", &conversation] {
            ann.post(path, body.clone()).await?.refused(400, "invalid_attachments")?;
        }
    }
    assert_eq!(key.get("/v1/channels/general/messages").await?.success()?[0]["id"], posted["id"], "nothing was posted");
    let none = json!({ "text": "plain", "attachments": [] });
    assert_eq!(ann.post("/v1/channels/general/messages", none).await?.success()?["has_attachments"], false);
    Ok(())
}
