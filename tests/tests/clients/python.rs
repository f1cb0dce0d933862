//! `relaycast-sdk` 1.0.0 from PyPI, unmodified, against two gateways.

use anyhow::Result;
use relay_acceptance::chaos::database::Database;
use relay_acceptance::clients::{ClientHistory, Front, Script};
use relay_acceptance::golden::Tapped;
use relay_testkit::client::Api;
use relay_testkit::stack::Stack;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_works() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let workspace = Api::create_workspace(a, "sdk-python").await?;
    let script = Script::python("main.py").await?.env("RELAY_A", a).env("RELAY_B", b);
    script.env("RELAY_KEY", workspace.token()).run(async |request| panic!("{request:?} was not expected")).await?;
    gateways.compare("python_main")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_survives_its_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let workspace = Api::create_workspace(other.url(), "sdk-python").await?;
    let script = Script::python("failover.py").await?.env("RELAY_FRONT", front.url()).env("RELAY_OTHER", other.url());
    let history = ClientHistory::new("ada");
    script
        .env("RELAY_KEY", workspace.token())
        .run(async |request| match request.0.as_str() {
            "kill -9 the gateway" => {
                victim.kill9();
                Ok(())
            }
            _ => history.record_report(&request),
        })
        .await
        .inspect_err(|_| println!("{}", stack.logs(30)))?;
    history.judge(&Database::connect(stack.database_url())?, &workspace).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_of_the_python_sdk_serves_actions() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let workspace = Api::create_workspace(a, "sdk-python-actions").await?;
    let script = Script::python("actions.py").await?.env("RELAY_A", a).env("RELAY_B", b);
    script.env("RELAY_KEY", workspace.token()).run(async |request| panic!("{request:?} was not expected")).await?;
    gateways.compare("python_actions")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_accepts_every_response() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let workspace = Api::create_workspace(a, "sdk-python-rest").await?;
    let script = Script::python("rest.py").await?.env("RELAY_A", a).env("RELAY_B", b);
    script.env("RELAY_KEY", workspace.token()).run(async |request| panic!("{request:?} was not expected")).await?;
    gateways.compare("python_rest")
}
