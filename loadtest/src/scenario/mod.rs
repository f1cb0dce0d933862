//! Scenarios, one file each.

mod batch;
pub(crate) mod fair;
mod fanout;
mod idle;
mod invoke;
mod live;
mod node;
mod observe;
mod placement;
mod push;
mod read;
mod reconnect;
mod replay;
mod returning;
mod rolling;

use anyhow::Result;

use crate::baseline::{Consumers, GatewayProcess, JetStream, rows, serve};
use crate::cli::{Common, Scenario};
use crate::drive::Load;
use crate::report::Report;
use crate::target::Target;

/// Runs `scenario`; after an error `report` contains what was measured before.
pub(crate) async fn run(scenario: &Scenario, common: &Common, report: &mut Report) -> Result<()> {
    match scenario {
        Scenario::Baselines { agents } => baselines(common, common.scaled(*agents), report).await,
        Scenario::Send { rate, agents } => live::send(common, *rate, *agents, report).await,
        Scenario::Saturate { agents } => live::saturate(common, agents, report).await,
        Scenario::Gateways { agents } => live::gateways(common, common.scaled(*agents), report).await,
        Scenario::Batch { agents, posts, senders_at_once } => {
            batch::run(common, common.scaled(*agents), (*posts).into(), (*senders_at_once).into(), report).await
        }
        Scenario::Fanout { members, posts_in_flight } => fanout::run(common, members, *posts_in_flight, report).await,
        Scenario::Reconnect { agents, on_each_socket, unacked } => {
            reconnect::run(common, common.scaled(*agents), *on_each_socket, *unacked, report).await
        }
        Scenario::Returning { agents } => returning::run(common, common.scaled(*agents), report).await,
        Scenario::Replay { messages, agents } => {
            replay::run(common, common.scaled(*messages), common.scaled(*agents), report).await
        }
        Scenario::Rolling { rate, agents } => rolling::run(common, *rate, common.scaled(*agents), report).await,
        Scenario::Idle { agents, direct_agents } => {
            idle::run(common, common.scaled(*agents), common.scaled(*direct_agents), report).await
        }
        Scenario::Observe { observers, rate, agents } => {
            observe::run(common, common.scaled(*observers), *rate, common.scaled(*agents), report).await
        }
        Scenario::Push { endpoints, each } => {
            push::run(common, common.scaled(*endpoints), common.scaled(*each), report).await
        }
        Scenario::Read { messages } => read::run(common, common.scaled(*messages), report).await,
        Scenario::Invoke { nodes, burst, rate } => {
            invoke::run(common, *nodes, common.scaled(*burst), *rate, report).await
        }
        Scenario::Fair { abuse } => fair::run(common, abuse, report).await,
        Scenario::Placement { nodes, burst } => placement::run(common.scaled(*nodes), common.scaled(*burst), report),
        Scenario::Node { published, agents, messages, rounds } => {
            let size = node::Size {
                published: published.as_deref(),
                agents: common.scaled(*agents),
                messages: common.scaled(*messages),
                rounds: *rounds,
            };
            node::run(common, &size, report).await
        }
        Scenario::BaselineGateway { database, nats } => serve(database, nats).await,
        Scenario::All => all(common, report).await,
    }
}

async fn all(common: &Common, report: &mut Report) -> Result<()> {
    live::send(common, 200.0, 1, report).await?;
    live::send(common, 1000.0, 100, report).await?;
    live::saturate(common, &[100, 1000], report).await?;
    live::gateways(common, common.scaled(100), report).await?;
    batch::run(common, common.scaled(100), 100, 16, report).await?;
    fanout::run(common, &[100, 1000], 16, report).await?;
    replay::run(common, common.scaled(10_000), common.scaled(100), report).await?;
    reconnect::run(common, common.scaled(10_000), 100, 10, report).await?;
    returning::run(common, common.scaled(5_000), report).await?;
    invoke::run(common, 20, common.scaled(1000), 200.0, report).await?;
    push::run(common, common.scaled(100), common.scaled(400), report).await?;
    read::run(common, common.scaled(100_000), report).await?;
    idle::run(common, common.scaled(10_000), common.scaled(5_000), report).await
}

async fn baselines(common: &Common, agents: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, 0).await?;
    let load = Load::closed(common.in_flight.into(), common.window());
    gateway_baseline(&target, common, agents, &agents.to_string(), &load, report).await?;
    report.add(rows(target.stack().postgres(), common.bytes as usize, common.window()).await?);
    for consumers in [common.each(), Consumers::One] {
        let label = format!("{agents}");
        live_baseline(&target, common, consumers, agents, &label, &load, report).await?;
        let paced = Load::paced(1000.0, common.window());
        live_baseline(&target, common, consumers, agents, &format!("{agents} at 1000/s"), &paced, report).await?;
        replay_baseline(&target, common, consumers, agents, common.scaled(10_000), report).await?;
    }
    Ok(())
}

/// Measures JetStream consumers that receive `load` while it is published.
async fn live_baseline(
    target: &Target,
    common: &Common,
    consumers: Consumers,
    agents: usize,
    label: &str,
    load: &Load,
    report: &mut Report,
) -> Result<usize> {
    let bare = JetStream::create(target.stack().nats(), consumers, agents, common.bytes as usize).await?;
    let row = bare.live(label, load, common.warming()).await?;
    bare.delete().await?;
    Ok(report.add(row))
}

/// Measures the baseline gateway under `load`.
async fn gateway_baseline(
    target: &Target,
    common: &Common,
    agents: usize,
    label: &str,
    load: &Load,
    report: &mut Report,
) -> Result<usize> {
    let gateway = GatewayProcess::start(target).await?;
    let row = gateway.live(common, agents, label, load).await?;
    Ok(report.add(row))
}

/// Measures JetStream consumers with `messages` waiting.
async fn replay_baseline(
    target: &Target,
    common: &Common,
    consumers: Consumers,
    agents: usize,
    messages: usize,
    report: &mut Report,
) -> Result<usize> {
    let bare = JetStream::create(target.stack().nats(), consumers, agents, common.bytes as usize).await?;
    let row = bare.replay(messages).await?;
    bare.delete().await?;
    Ok(report.add(row))
}
