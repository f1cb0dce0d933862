//! The reference page in a real browser: it shows every operation, is usable with the keyboard alone, in light and
//! dark, and contacts only its gateway.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use relay_acceptance::browser::Browser;
use relay_acceptance::raw::Raw;
use relay_testkit::shared;
use serde_json::{Value, json};

#[tokio::test]
async fn a_person_finds_an_operation_with_the_keyboard() -> Result<()> {
    let base = shared().await.any_gateway();
    let document = Raw::new("GET", format!("{base}/openapi.json")).send().await?.body;
    let methods = document["paths"].as_object().into_iter().flat_map(|paths| paths.values());
    let operations: usize = methods.filter_map(Value::as_object).map(|methods| methods.len()).sum();

    let browser = Browser::start().await?;
    let mut page = browser.open(&format!("{base}/docs")).await?;
    page.wait_until("the operations", "document.querySelectorAll('article').length > 0").await?;
    let shown = page.eval("document.querySelectorAll('article').length").await?;
    assert_eq!((shown, operations > 50), (json!(operations), true), "every operation shows");
    let text = page.text("document.body.innerText").await?;
    ensure!(!text.contains("[object") && !text.contains("undefined"), "something was not shown as text");
    // Shows the schema of a body and its answers, with examples.
    let post = page.text("document.getElementById('messages_to_channel').innerText").await?;
    for expected in
        ["/v1/channels/{name}/messages", "Idempotency-Key", "injection_mode", "\"text\"", "channel_archived"]
    {
        ensure!(post.contains(expected), "{expected} is missing in {post}");
    }

    page.press("/").await?;
    page.wait_until("the filter to have the focus", "document.activeElement.id === 'filter'").await?;
    page.type_text("defer").await?;
    page.wait_until("one operation to be left", "document.querySelectorAll('#list li:not([hidden])').length === 1")
        .await?;
    page.press("Enter").await?;
    page.wait_until("its address", "location.hash === '#deliveries_defer'").await?;
    page.wait_until(
        "to be where it is",
        "Math.abs(document.getElementById('deliveries_defer').getBoundingClientRect().top) < 300",
    )
    .await?;

    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("reference");
    std::fs::create_dir_all(&folder)?;
    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        page.set_color_scheme(scheme).await?;
        grounds.push(page.text("getComputedStyle(document.body).backgroundColor").await?);
        let file = folder.join(format!("reference-{scheme}.png"));
        page.screenshot(&file).await?;
        println!("screenshot: {}", file.display());
    }
    ensure!(grounds[0] != grounds[1], "{grounds:?}");
    ensure!(page.faults().is_empty(), "{:?}", page.faults());
    ensure!(page.requested().iter().all(|url| url.starts_with(base)), "{:?}", page.requested());
    Ok(())
}
