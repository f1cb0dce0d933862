//! `replay`: messages accepted while no agent was connected, then all agents connect at once.

use std::sync::Arc;

use anyhow::Result;

use super::replay_baseline;
use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::fleet::{Fleet, nodes};
use crate::posts::direct_messages;
use crate::report::{Better, Ratio, Report};
use crate::target::Target;
use crate::window::Window;

/// Sends `messages` to `agents` and measures from the first connect to the last frame.
pub(crate) async fn run(common: &Common, messages: usize, agents: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let each = match common.no_baselines {
        true => None,
        false => Some(replay_baseline(&target, common, common.each(), agents, messages, report).await?),
    };
    let workspace = Workspace::create(&target.urls()).await?;
    let senders = workspace.agents("s", agents.min(common.senders.into())).await?;
    let receivers = workspace.agents("r", agents).await?;
    let specs = nodes(&workspace, &receivers, common.per_socket.into(), "lt").await?;
    let collector = Arc::new(Collector::default());
    let send = direct_messages(&workspace, &senders, &receivers, common.bytes as usize);
    let sent = drive(&Load::counted(common.in_flight.into(), messages), &collector, send).await;

    let roots = target.roots();
    let window = Window::open_for_old(&roots, &collector);
    let _fleet = Fleet::connect(&workspace, &specs, &collector).await?;
    let missing = collector.drain(sent.accepted).await;
    let mut row = window.close(format!("replay {messages} over {agents}"));
    row.add_sent(sent);
    // The timestamps precede the window, so their age is meaningless.
    row.latency = None;
    row.notes.push(format!(
        "{} gateways, {} agents a socket, connects included",
        target.urls().len(),
        common.per_socket
    ));
    if missing > 0 {
        row.problems.push(format!("{missing} deliveries never came"));
    }
    let ours = report.add(row);
    let Some(each) = each else { return Ok(()) };
    if let (Some(ours), Some(each)) = (report.rows[ours].per_second, report.rows[each].per_second) {
        report.ratios.push(Ratio {
            target: "S8",
            what: format!("replay of {messages} over {agents} agents: {ours:.0}/s / js-each: {each:.0}/s"),
            value: ours / each,
            ship: 1.0,
            goal: 2.0,
            better: Better::Higher,
        });
    }
    Ok(())
}
