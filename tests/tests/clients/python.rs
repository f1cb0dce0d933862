//! `relaycast-sdk` 1.0.0 from PyPI, unmodified, against two gateways.

use anyhow::Result;
use relay_acceptance::clients::Script;
use relay_acceptance::golden::Tapped;
use relay_testkit::client::Api;

use crate::gateway_kill::survives_its_gateway;

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
    survives_its_gateway("sdk-python", Script::python("failover.py").await?).await
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
