//! The console in a real browser: it shows the actual data, survives a crash of its gateway without gaps or repeats,
//! and is usable with the keyboard alone, in light and dark.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use relay_acceptance::browser::{Browser, Page};
use relay_testkit::client::Api;
use relay_testkit::stack::Stack;
use serde_json::{Value, json};

const SCOPES: [&str; 12] = [
    "stream:read",
    "messages:read",
    "threads:read",
    "dms:read",
    "channels:read",
    "search:read",
    "agents:read",
    "nodes:read",
    "deliveries:read",
    "activity:read",
    "files:read",
    "reactions:read",
];
const LIVE: &str = "document.querySelector('#connection').dataset.state === 'live'";

/// Creates an observer token; returns its id and text.
async fn observer(key: &Api, name: &str, scopes: &[&str]) -> Result<(String, String)> {
    let body = json!({ "name": name, "scopes": scopes, "filters": { "include_dms": true } });
    let made = key.post("/v1/observer-tokens", body).await?.success()?;
    let text = |field: &str| made[field].as_str().map(str::to_owned).context("a field is missing");
    Ok((text("id")?, text("token")?))
}

/// Signs in with the keyboard: the token field has the focus.
async fn sign_in(page: &mut Page, token: &str) -> Result<()> {
    page.wait_until("the field to have the focus", "document.activeElement?.id === 'token'").await?;
    page.type_text(token).await?;
    page.press("Enter").await
}

/// Returns the path of a screenshot among the artefacts of the tests.
fn artefact(name: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("console");
    std::fs::create_dir_all(&folder)?;
    Ok(folder.join(name))
}

/// Returns the messages that the page shows, in its order.
async fn shown_messages(page: &mut Page) -> Result<Vec<String>> {
    let texts =
        page.eval("[...document.querySelectorAll('#message-list li > div')].map((div) => div.textContent)").await?;
    Ok(texts.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// Waits until a text is shown in a part of the page.
async fn wait_for_text(page: &mut Page, part: &str, text: &str) -> Result<()> {
    let expression = format!("document.querySelector('{part}')?.textContent.includes({}) === true", json!(text));
    page.wait_until(&format!("{text:?} in {part}"), &expression).await
}

#[tokio::test]
async fn the_console_shows_a_workspace_completely() -> Result<()> {
    let stack = Stack::builder().start().await?;
    let key = Api::create_workspace(stack.gateway(1).url(), "watched").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let as_ann = key.as_agent(&ann);
    key.create_broker_node("node_box", "box").await?;
    as_ann.create_channel("room").await?;
    as_ann.post_message("general", "said before anybody looked").await?.success()?;
    let (token_id, token) = observer(&key, "everything", &SCOPES).await?;

    let browser = Browser::start().await?;
    let mut page = browser.open(&format!("{}/console", stack.gateway(0).url())).await?;
    sign_in(&mut page, &token).await?;
    page.wait_until("the page to be live", LIVE).await?;

    check_existing_data(&mut page).await?;
    check_live_updates(&mut page, &as_ann, &bob.name).await?;
    // The other gateway accepts posts while the page's own is down.
    stack.gateway(0).kill9();
    page.wait_until("the page to know", &format!("!({LIVE})")).await?;
    for number in 0..20 {
        as_ann.post_message("general", &format!("while away {number}")).await?.success()?;
    }
    stack.gateway(0).restart().await?;
    page.wait_until("the page to be live again", LIVE).await?;
    as_ann.post_message("general", "after all that").await?.success()?;
    wait_for_text(&mut page, "#message-list", "after all that").await?;
    check_completeness(&mut page).await?;

    check_keyboard_access(&mut page).await?;
    check_contrast(&mut page).await?;
    check_accessible_names(&mut page).await?;
    check_token_confinement(&mut page, stack.gateway(0).url(), &token).await?;

    key.delete(&format!("/v1/observer-tokens/{token_id}")).await?;
    page.wait_until("the page to sign out", "!document.querySelector('#sign-in').hidden").await?;
    ensure!(page.eval("sessionStorage.length").await? == json!(0), "the token is forgotten");
    ensure!(page.faults().is_empty(), "{:?}", page.faults());
    Ok(())
}

async fn check_existing_data(page: &mut Page) -> Result<()> {
    wait_for_text(page, "#message-list", "said before anybody looked").await?;
    for (list, text) in [("#channels", "#room"), ("#agents", "ann"), ("#nodes", "box"), ("#mailboxes", "bob")] {
        wait_for_text(page, list, text).await?;
    }
    wait_for_text(page, "#feed", "message.created").await?;
    ensure!(page.text("document.querySelector('#workspace-name').textContent").await?.starts_with("watched-"));
    // The message waits for bob: one delivery, not acknowledged.
    let row = "[...document.querySelectorAll('#mailboxes tr')].find((row) => row.cells[0].textContent === 'bob')";
    let cells = format!("[...{row}.cells].map((cell) => cell.textContent).join(' ') === 'bob 1 0 0 1'");
    page.wait_until("bob's mailbox", &cells).await
}

async fn check_live_updates(page: &mut Page, ann: &Api, bob: &str) -> Result<()> {
    let markup = "<img src=x onerror=alert(1)> & 'quotes'";
    ann.post_message("general", markup).await?.success()?;
    wait_for_text(page, "#message-list", markup).await?;
    ann.post_message("room", "elsewhere").await?.success()?;
    let fresh = "document.querySelector('#channels [data-name=room] .fresh')?.textContent === '1'";
    page.wait_until("the other channel to count", fresh).await?;
    ann.dm(bob, "between us").await?.success()?;
    wait_for_text(page, "#feed", "between us").await?;
    let lag = "[...document.querySelectorAll('#mailboxes tr')]
        .some((row) => row.cells[0].textContent === 'bob' && row.cells[1].textContent === '3')";
    page.wait_until("bob's mailbox to grow", lag).await
}

/// Checks that every message and every event is shown once and in order.
async fn check_completeness(page: &mut Page) -> Result<()> {
    let texts = shown_messages(page).await?;
    let away: Vec<_> = texts.iter().filter(|text| text.starts_with("while away")).cloned().collect();
    let expected: Vec<_> = (0..20).map(|number| format!("while away {number}")).collect();
    ensure!(away == expected, "{texts:?}");
    wait_for_text(page, "#feed", "after all that").await?;
    let seqs = page.eval("[...document.querySelectorAll('#feed li')].map((row) => Number(row.dataset.seq))").await?;
    let seqs: Vec<i64> = seqs.as_array().into_iter().flatten().filter_map(Value::as_i64).collect();
    // The token sees everything, so the numbers have no gap.
    ensure!(seqs.len() > 20 && seqs.windows(2).all(|pair| pair[1] == pair[0] + 1), "{seqs:?}");
    Ok(())
}

async fn check_keyboard_access(page: &mut Page) -> Result<()> {
    let focus = |id: &str| format!("document.activeElement?.id === '{id}'");
    page.press("?").await?;
    page.wait_until("the shortcuts to be listed", "document.querySelector('#keys').open").await?;
    page.press("Escape").await?;
    page.wait_until("the list to close", "!document.querySelector('#keys').open").await?;
    for (key, panel) in [("1", "channels-panel"), ("5", "mailboxes-panel"), ("2", "messages")] {
        page.press(key).await?;
        page.wait_until(panel, &focus(panel)).await?;
    }
    page.press("j").await?;
    let room = "document.querySelector('#channels [aria-current=true]')?.dataset.name === 'room'";
    page.wait_until("the next channel", room).await?;
    wait_for_text(page, "#message-list", "elsewhere").await?;
    page.press("/").await?;
    page.wait_until("the filter to have the focus", &focus("filter-text")).await?;
    page.type_text("away 7").await?;
    page.wait_until("one event to pass", "document.querySelectorAll('#feed li').length === 1").await?;
    page.press("Escape").await?;
    page.press("p").await?;
    page.wait_until("the feed to pause", "document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")
        .await?;
    page.press("p").await?;
    page.eval("document.querySelector('#filters').reset()").await?;
    page.wait_until("all events again", "document.querySelectorAll('#feed li').length > 20").await?;
    // From the top, the first tab stop is the skip link.
    page.eval("document.body.setAttribute('tabindex', '-1'); document.body.focus()").await?;
    page.press("Tab").await?;
    page.wait_until("the skip link", "document.activeElement?.className === 'skip'").await?;
    page.press("Enter").await?;
    page.wait_until("the messages to have the focus", &focus("messages")).await
}

/// Checks the contrast of text in both color schemes.
async fn check_contrast(page: &mut Page) -> Result<()> {
    let contrast = r"(() => {
        const light = (colour) => {
            const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map((part) => part / 255)
                .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const colour = getComputedStyle(at).backgroundColor;
                if (!colour.endsWith(', 0)')) return colour;
            }
            return 'rgb(255, 255, 255)';
        };
        const poor = [];
        const texts = 'h1, h2, th, td, time, button, .muted, .who, .what, .fresh, #connection-text';
        for (const element of document.querySelectorAll(texts)) {
            if (element.getClientRects().length === 0 || element.textContent === '') continue;
            const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${element.tagName} ${element.className} ${element.textContent}`);
        }
        return poor;
    })()";
    let mut grounds = Vec::new();
    for (scheme, file) in [("light", "console-light.png"), ("dark", "console.png")] {
        page.set_color_scheme(scheme).await?;
        grounds.push(page.text("getComputedStyle(document.body).backgroundColor").await?);
        let poor = page.eval(contrast).await?;
        ensure!(poor == json!([]), "{scheme}: {poor}");
        let file = artefact(file)?;
        page.screenshot(&file).await?;
        println!("screenshot: {}", file.display());
    }
    ensure!(grounds[0] != grounds[1], "{grounds:?}");
    Ok(())
}

/// Checks that every control has an accessible name.
async fn check_accessible_names(page: &mut Page) -> Result<()> {
    page.call("Accessibility.enable", json!({})).await?;
    let tree = page.call("Accessibility.getFullAXTree", json!({})).await?;
    let nodes = tree["nodes"].as_array().context("a tree")?;
    let operable = ["button", "textbox", "searchbox", "combobox", "link", "log", "region"];
    let (mut named, mut nameless) = (0, Vec::new());
    for node in nodes.iter().filter(|node| node["ignored"] != json!(true)) {
        if operable.contains(&node["role"]["value"].as_str().unwrap_or_default()) {
            match node["name"]["value"].as_str() {
                Some(name) if !name.trim().is_empty() => named += 1,
                _ => nameless.push(node.to_string()),
            }
        }
    }
    ensure!(nameless.is_empty() && named > 15, "{named} named, without a name: {nameless:?}");
    Ok(())
}

/// Checks that the token stays in this tab, and that only the gateway is contacted.
async fn check_token_confinement(page: &mut Page, gateway: &str, token: &str) -> Result<()> {
    let address = page.text("location.href").await?;
    ensure!(!address.contains("ot_live_"), "{address}");
    ensure!(page.eval("document.cookie === '' && localStorage.length === 0").await? == json!(true));
    ensure!(page.eval("Object.values(sessionStorage)").await? == json!([token]));
    let ours = [gateway.to_owned(), gateway.replacen("http", "ws", 1)];
    for url in page.requested() {
        ensure!(ours.iter().any(|own| url.starts_with(own.as_str())), "{url}");
        ensure!(!url.contains("ot_live_"), "{url}");
    }
    Ok(())
}

#[tokio::test]
async fn a_missing_scope_hides_its_panel_only() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "partly").await?;
    let ann = key.register_agent("ann").await?;
    let (_, token) = observer(&key, "agents only", &["agents:read", "stream:read"]).await?;
    let (_, blind) = observer(&key, "no stream", &["agents:read", "channels:read", "messages:read"]).await?;
    key.as_agent(&ann).post_message("general", "not for everybody").await?.success()?;

    let browser = Browser::start().await?;
    let mut page = browser.open(&format!("{}/console", stack.gateway(0).url())).await?;
    for wrong in [key.token(), &key.token().replace("rk_", "ot_")] {
        sign_in(&mut page, wrong).await?;
        page.wait_until("a refusal", "document.querySelector('#token-error').textContent !== ''").await?;
        ensure!(page.eval("sessionStorage.length").await? == json!(0), "only what works is kept");
        page.eval("document.querySelector('#token').value = ''").await?;
    }

    sign_in(&mut page, &token).await?;
    page.wait_until("the page to be live", LIVE).await?;
    wait_for_text(&mut page, "#agents", "ann").await?;
    for (panel, scope) in
        [("#nodes-panel", "nodes:read"), ("#mailboxes-panel", "deliveries:read"), ("#channels-panel", "channels:read")]
    {
        wait_for_text(&mut page, &format!("{panel} .hint:not([hidden])"), scope).await?;
    }
    ensure!(!page.text("document.body.innerText").await?.contains("not for everybody"));
    page.eval("document.querySelector('#sign-out').click()").await?;

    // Without the stream nothing is live, and the rest is shown.
    sign_in(&mut page, &blind).await?;
    wait_for_text(&mut page, "#message-list", "not for everybody").await?;
    wait_for_text(&mut page, "#feed-panel .hint:not([hidden])", "stream:read").await?;
    wait_for_text(&mut page, "#connection", "stream:read").await?;
    ensure!(page.faults().is_empty(), "{:?}", page.faults());
    Ok(())
}
