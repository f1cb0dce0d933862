//! Clients that stay connected while their gateway is killed.

use anyhow::Result;
use relay_acceptance::chaos::database::Database;
use relay_acceptance::clients::{ClientHistory, Front, Script};
use relay_acceptance::golden::Tapped;
use relay_testkit::client::Api;
use relay_testkit::history::Losses;
use relay_testkit::stack::Stack;

/// Runs a script that asks to kill the gateway of its clients and reports their history, which is judged.
pub(crate) async fn survives_its_gateway(workspace: &str, script: Script) -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let gateways = Tapped::new([front.url()]).await?;
    let workspace = Api::create_workspace(other.url(), workspace).await?;
    let history = ClientHistory::new("ada");
    script
        .env("RELAY_FRONT", gateways.urls()[0])
        .env("RELAY_OTHER", other.url())
        .env("RELAY_KEY", workspace.token())
        .run(async |request| match request.0.as_str() {
            "kill -9 the gateway" => {
                victim.kill9();
                Ok(())
            }
            _ => history.record_report(&request).map(drop),
        })
        .await
        .inspect_err(|_| println!("{}", stack.logs(30)))?;
    let database = Database::connect(stack.database_url())?;
    history.judge(gateways.recording(), &database, &workspace, Losses::None).await
}
