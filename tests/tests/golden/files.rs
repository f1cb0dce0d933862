//! Files: declared, sent, completed, attached, deleted.

use anyhow::Result;
use relay_acceptance::raw::Raw;

use crate::walk::{Walk, ask, ask_all, text};

#[tokio::test]
async fn files() -> Result<()> {
    let walk = Walk::new("files").await?;
    let (ada_is, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let upload = r#"POST /v1/files/upload {"filename":"plan.txt","content_type":"text/plain","size_bytes":4}"#;
    let declared = ask(&ada, upload).await?;
    let (id, url) = (text(&declared, "/id")?, text(&declared, "/upload_url")?);
    let one = format!("/v1/files/{id}");
    ask_all(
        &ada,
        &[
            r#"POST /v1/files/upload {"filename":"plan.txt","content_type":"text/plain","size":4}"#,
            r#"POST /v1/files/upload {"filename":"plan.txt","content_type":"text/plain","size_bytes":0}"#,
            r#"POST /v1/files/upload {"filename":"","content_type":"text/plain","size_bytes":1}"#,
            r#"POST /v1/files/upload {"filename":"a","content_type":"text/plain","size_bytes":1099511627776}"#,
            "POST /v1/files/upload {}",
            &format!("GET {one}"),
            &format!("POST {one}/complete"),
        ],
    )
    .await?;
    Raw::new("PUT", &url).body("too long").send().await?;
    Raw::new("PUT", &url).body("four").send().await?;
    let base = ada.base();
    Raw::new("PUT", format!("{base}/_relayfiles?token=wrong")).body("four").send().await?;
    Raw::new("PUT", format!("{base}/_relayfiles")).body("four").send().await?;
    let complete = ask(&ada, &format!("POST {one}/complete")).await?;
    ask_all(&ada, &[&format!("POST {one}/complete"), "POST /v1/files/7/complete"]).await?;
    let url = text(&complete, "/download_url")?;
    Raw::new("GET", &url).send().await?;
    Raw::new("GET", &url).header("range", "bytes=1-2").send().await?;
    Raw::new("GET", format!("{base}/_relayfiles?token=wrong")).send().await?;
    ask_all(
        &ada,
        &[
            &format!("GET {one}"),
            "GET /v1/files/7",
            "GET /v1/files",
            "GET /v1/files?limit=1",
            "GET /v1/files?limit=0",
            &format!("GET /v1/files?uploaded_by={}", ada_is.id),
            &format!(r#"POST /v1/channels/general/messages {{"text":"see","attachments":["{id}"]}}"#),
            &format!(r#"POST /v1/channels/general/messages {{"text":"see","attachments":["{id}","{id}"]}}"#),
            &format!(r#"POST /v1/dm {{"to":"bob","text":"see","attachments":["{id}"]}}"#),
        ],
    )
    .await?;
    let bob = walk.there(&bob);
    ask_all(&bob, &[&format!("DELETE {one}"), &format!("POST {one}/complete"), "GET /v1/deliveries"]).await?;
    ask_all(
        &ada,
        &[
            &format!("DELETE {one}"),
            &format!("DELETE {one}"),
            "DELETE /v1/files/7",
            &format!("GET {one}"),
            "GET /v1/channels/general/messages",
        ],
    )
    .await?;
    Raw::new("GET", &url).send().await?;
    walk.end()
}
