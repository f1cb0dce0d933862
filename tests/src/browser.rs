//! Headless Chromium, driven over the DevTools protocol.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures::{SinkExt, StreamExt};
use relay_testkit::process::{Process, Spec};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Message, protocol::WebSocketConfig};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

/// Time from start to the open debugging port on a loaded machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of one protocol command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of waiting for page content.
const SOON: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// Running browser, stopped when dropped.
#[derive(Debug)]
pub struct Browser {
    _process: Process,
    debugger: String,
    _profile: tempfile::TempDir,
}

/// Open tab.
pub struct Page {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    next_id: u64,
    /// Uncaught exceptions and violations of the page's content security policy.
    faults: Vec<String>,
    /// URLs that the page requested.
    requested: Vec<String>,
}

impl Browser {
    /// Starts a browser with an empty profile.
    pub async fn start() -> Result<Self> {
        let program = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find_map(find)
            .context("no chromium on PATH; `.ci/run` installs Debian's")?;
        let profile = tempfile::tempdir()?;
        let mut spec = Spec::new("chromium", program, profile.path().join("chromium.log"));
        spec.args = [
            "--headless=new",
            // The tests may run as root, where the sandbox cannot start.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--no-proxy-server",
            "--remote-debugging-port=0",
            "--window-size=1400,900",
        ]
        .map(str::to_owned)
        .to_vec();
        spec.args.push(format!("--user-data-dir={}", profile.path().display()));
        spec.env.push(("HOME".to_owned(), Some(profile.path().display().to_string())));
        let process = Process::start(spec)?;
        let port_file = profile.path().join("DevToolsActivePort");
        let port = wait::until_ok("chromium's debugging port", START_TIMEOUT, || async {
            ensure!(process.is_running(), "it ended: {}", process.log_tail(10));
            let text = tokio::fs::read_to_string(&port_file).await?;
            let port = text.lines().next().context("an empty file")?;
            Ok::<u16, anyhow::Error>(port.parse()?)
        })
        .await?;
        Ok(Self { _process: process, debugger: format!("http://127.0.0.1:{port}"), _profile: profile })
    }

    /// Opens a tab.
    pub async fn open(&self, url: &str) -> Result<Page> {
        let http = relay_testkit::http::client().build()?;
        let tab: Value = http.put(format!("{}/json/new?about:blank", self.debugger)).send().await?.json().await?;
        let address = tab["webSocketDebuggerUrl"].as_str().context("a tab without an address")?;
        // A screenshot is a large frame.
        let limits = WebSocketConfig::default().max_message_size(Some(64 << 20)).max_frame_size(Some(64 << 20));
        let (socket, _) = tokio_tungstenite::connect_async_with_config(address, Some(limits), true).await?;
        let mut page = Page { socket, next_id: 0, faults: Vec::new(), requested: Vec::new() };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            page.call(&format!("{domain}.enable"), json!({})).await?;
        }
        page.call("Page.navigate", json!({ "url": url })).await?;
        page.wait_until(
            "the page to be loaded",
            "document.readyState === 'complete' && location.href !== 'about:blank'",
        )
        .await?;
        Ok(page)
    }
}

impl Page {
    /// Sends one command and waits for its result.
    pub async fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.next_id += 1;
        let id = self.next_id;
        let text = json!({ "id": id, "method": method, "params": params }).to_string();
        self.socket.send(Message::text(text)).await?;
        let answer = async {
            loop {
                let message = self.socket.next().await.ok_or_else(|| anyhow!("the tab is gone"))??;
                let Message::Text(text) = message else { continue };
                let frame: Value = serde_json::from_str(&text)?;
                if frame["id"] == json!(id) {
                    return Ok::<_, anyhow::Error>(frame);
                }
                note(&frame, &mut self.faults, &mut self.requested);
            }
        };
        let frame = timeout(COMMAND_TIMEOUT, answer).await.with_context(|| format!("no answer to {method}"))??;
        ensure!(frame.get("error").is_none(), "{method}: {}", frame["error"]);
        Ok(frame["result"].clone())
    }

    /// Evaluates an expression, awaiting promises.
    pub async fn eval(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", params).await?;
        ensure!(result.get("exceptionDetails").is_none(), "{expression}: {}", result["exceptionDetails"]);
        Ok(result["result"]["value"].clone())
    }

    /// Evaluates an expression to a text; empty for other values.
    pub async fn text(&mut self, expression: &str) -> Result<String> {
        Ok(self.eval(expression).await?.as_str().unwrap_or_default().to_owned())
    }

    /// Waits up to 30 s until an expression is true; the error contains the page's text.
    pub async fn wait_until(&mut self, what: &str, expression: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            // Evaluation may fail while the page loads.
            let last = self.eval(expression).await;
            if matches!(last, Ok(Value::Bool(true))) {
                return Ok(());
            }
            if started.elapsed() > SOON {
                let shown = self.text("document.body.innerText").await.unwrap_or_default();
                bail!("waited {SOON:?} for {what}: {last:?}; faults {:?}; the page shows:\n{shown}", self.faults);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Presses and releases a key: a character, or a name such as `Tab`.
    pub async fn press(&mut self, key: &str) -> Result<()> {
        let mut event = json!({ "key": key });
        let named = match key {
            "Tab" => Some(9),
            "Enter" => Some(13),
            "Escape" => Some(27),
            _ => None,
        };
        match named {
            Some(code) => event["windowsVirtualKeyCode"] = json!(code),
            None => event["text"] = json!(key),
        }
        if key == "Enter" {
            event["text"] = json!("\r");
        }
        for kind in ["keyDown", "keyUp"] {
            event["type"] = json!(kind);
            self.call("Input.dispatchKeyEvent", event.clone()).await?;
            event.as_object_mut().into_iter().for_each(|event| drop(event.remove("text")));
        }
        Ok(())
    }

    /// Types text into the focused element.
    pub async fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({ "text": text })).await.map(drop)
    }

    /// Emulates the color scheme `light` or `dark`.
    pub async fn set_color_scheme(&mut self, scheme: &str) -> Result<()> {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features })).await.map(drop)
    }

    /// Saves a screenshot.
    pub async fn screenshot(&mut self, file: &Path) -> Result<()> {
        use base64::Engine as _;
        let result = self.call("Page.captureScreenshot", json!({ "format": "png" })).await?;
        let data = result["data"].as_str().context("no picture")?;
        let picture = base64::engine::general_purpose::STANDARD.decode(data)?;
        ensure!(picture.len() > 10_000, "a picture of {} bytes shows nothing", picture.len());
        std::fs::write(file, picture).with_context(|| format!("write {}", file.display()))
    }

    /// Returns the uncaught exceptions and policy violations so far.
    pub fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Returns the requested URLs so far.
    pub fn requested(&self) -> &[String] {
        &self.requested
    }
}

fn note(frame: &Value, faults: &mut Vec<String>, requested: &mut Vec<String>) {
    let params = &frame["params"];
    match frame["method"].as_str() {
        Some("Runtime.exceptionThrown") => faults.push(params["exceptionDetails"].to_string()),
        Some("Log.entryAdded") if params["entry"]["source"] == "security" => faults.push(params["entry"].to_string()),
        Some("Network.requestWillBeSent") => {
            requested.extend(params["request"]["url"].as_str().map(str::to_owned));
        }
        Some("Network.webSocketCreated") => requested.extend(params["url"].as_str().map(str::to_owned)),
        _ => {}
    }
}

fn find(name: &str) -> Option<std::path::PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|folder| folder.join(name)).find(|program| program.is_file())
}
