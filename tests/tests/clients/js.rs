//! `@relaycast/sdk` 6.0.2 and `@agent-relay/sdk` 9.1.6 from npm, unmodified, against two gateways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use relay_acceptance::chaos::database::Database;
use relay_acceptance::clients::{ClientHistory, Front, Script};
use relay_acceptance::golden::Tapped;
use relay_testkit::client::Api;
use relay_testkit::history::Losses;
use relay_testkit::proxy::{Direction, TcpProxy, Verdict};
use relay_testkit::stack::Stack;

use crate::gateway_kill::survives_its_gateway;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_works() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let flaky = TcpProxy::start(a.trim_start_matches("http://"))?;
    let script = Script::node("main.mjs").await?.env("RELAY_A", a).env("RELAY_B", b);
    let script = script.env("RELAY_FLAKY", format!("http://{}", flaky.address()));
    let lost = Arc::new(AtomicUsize::new(0));
    script
        .run(async |request| {
            assert_eq!(request.0, "lose the next 201");
            drop_next_created_answer(&flaky, Arc::clone(&lost));
            Ok(())
        })
        .await?;
    assert_eq!(lost.load(Ordering::SeqCst), 2, "each time an answer was lost, and its request repeated");
    gateways.compare("js_main")
}

/// Resets a connection instead of forwarding an answer with status 201.
fn drop_next_created_answer(proxy: &TcpProxy, lost: Arc<AtomicUsize>) {
    let mut armed = true;
    proxy.set_filter(Direction::ToClient, move |_, bytes| {
        if armed && bytes.starts_with(b"HTTP/1.1 201") {
            armed = false;
            lost.fetch_add(1, Ordering::SeqCst);
            return Verdict::DropThenReset;
        }
        Verdict::Forward
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_survives_its_gateway() -> Result<()> {
    survives_its_gateway("sdk-js", Script::node("failover.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_public_surface_of_the_javascript_sdk_works() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let gateways = Tapped::new([front.url()]).await?;
    let [tap] = gateways.urls();
    let script = Script::node("whole.mjs").await?.env("RELAY_FRONT", tap).env("RELAY_OTHER", other.url());
    let (history, database) = (ClientHistory::new("bob"), Database::connect(stack.database_url())?);
    script
        .run(async |request| {
            match request.0.as_str() {
                "kill -9 the gateway" => {
                    front.hold();
                    victim.kill9();
                }
                "let clients connect again" => front.release(),
                "start the gateway again" => victim.restart().await?,
                _ => {
                    let report = history.record_report(&request)?;
                    let workspace = Api::new(other.url(), report["key"].as_str().context("a key")?);
                    history.judge(gateways.recording(), &database, &workspace, Losses::None).await?;
                }
            }
            Ok(())
        })
        .await
        .inspect_err(|_| println!("{}", stack.logs(30)))?;
    gateways.compare("js_whole")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_relay_sdk_sees_every_item_of_its_inbox() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let script = Script::node("agent_relay.mjs").await?.env("RELAY_A", a).env("RELAY_B", b);
    script.run(async |request| panic!("{request:?} was not expected")).await?;
    gateways.compare("js_agent_relay")
}
