//! The running engine that non-destructive tests share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

use crate::stack::Stack;

/// Addresses of a running engine that other tests use concurrently: create separate workspaces, stop nothing.
#[derive(Debug)]
pub struct Shared {
    /// `http://host:port` of each gateway; at least two.
    pub gateways: Vec<String>,
    /// URL of the database.
    pub database_url: String,
    /// URL of the NATS server.
    pub nats_url: String,
    next: AtomicUsize,
    // Held so that a stack started here lives as long as the process.
    _own: Option<Stack>,
}

impl Shared {
    /// Returns a gateway, another one each time.
    pub fn any_gateway(&self) -> &str {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.gateways[turn % self.gateways.len()]
    }
}

/// Returns the shared engine: the one in `RELAY_TEST_GATEWAYS` (comma separated), `RELAY_TEST_DATABASE_URL` and
/// `RELAY_TEST_NATS_URL`, set by `cargo xtask test`, or a stack started once per process.
///
/// # Panics
/// If no engine is configured and none can be started.
pub async fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    // Started on a separate thread, because the stack outlives the runtime of the first test.
    let start = || SHARED.get_or_init(|| std::thread::spawn(obtain_engine).join().unwrap_or_else(|_| unavailable()));
    match tokio::task::spawn_blocking(start).await {
        Ok(shared) => shared,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

fn unavailable() -> Shared {
    panic!("the shared engine could not be started; see the message above")
}

fn obtain_engine() -> Shared {
    match from_environment().transpose().unwrap_or_else(start_stack) {
        Ok(shared) => shared,
        Err(error) => panic!("no shared engine: {error:#}"),
    }
}

fn from_environment() -> Result<Option<Shared>> {
    let Ok(gateways) = std::env::var("RELAY_TEST_GATEWAYS") else {
        return Ok(None);
    };
    let variable = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
    Ok(Some(Shared {
        gateways: gateways.split(',').map(|url| url.trim().to_owned()).collect(),
        database_url: variable("RELAY_TEST_DATABASE_URL")?,
        nats_url: variable("RELAY_TEST_NATS_URL")?,
        next: AtomicUsize::new(0),
        _own: None,
    }))
}

fn start_stack() -> Result<Shared> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // The runtime ends with this function; the processes of the stack do not need it.
    let stack = runtime.block_on(Stack::builder().start())?;
    Ok(Shared {
        gateways: stack.gateways().iter().map(|gateway| gateway.url().to_owned()).collect(),
        database_url: stack.database_url().to_owned(),
        nats_url: stack.nats_url(),
        next: AtomicUsize::new(0),
        _own: Some(stack),
    })
}
