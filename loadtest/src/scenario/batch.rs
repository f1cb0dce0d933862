//! `batch`: direct messages to connected agents in batches, compared with bare JetStream.

use anyhow::Result;

use super::{live::Scene, live_baseline};
use crate::batches::batched_messages;
use crate::cli::Common;
use crate::drive::Load;
use crate::report::{Better, Ratio, Report};
use crate::target::Target;

/// As fast as `senders` batches in flight allow.
pub(crate) async fn run(
    common: &Common,
    agents: usize,
    posts: usize,
    senders: usize,
    report: &mut Report,
) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let mut each = None;
    if !common.no_baselines {
        let load = Load::closed(common.in_flight.into(), common.window());
        each = Some(live_baseline(&target, common, common.each(), agents, &agents.to_string(), &load, report).await?);
    }
    // Twice as many messages as fit into the batches in flight, so that the next batches are full.
    let load = Load::closed(2 * senders * posts, common.window());
    // The mailbox limit of an agent bounds the backlog.
    let load = Load { backlog: load.backlog.min(500 * agents as u64), ..load };
    let scene = Scene::create(&target, common, senders, agents).await?;
    let send = batched_messages(&scene.workspace, &scene.senders, &scene.receivers, common.bytes as usize, posts);
    let ours = report.add(scene.measure(&format!("batch {agents}"), &load, send).await);
    let Some(each) = each else { return Ok(()) };
    let rate = |index: usize| report.rows[index].per_second.unwrap_or(0.0);
    let (ours, each) = (rate(ours), rate(each));
    report.ratios.push(Ratio {
        target: "batch",
        what: format!("batch {agents}: {ours:.0}/s / js-each {agents}: {each:.0}/s"),
        value: ours / each,
        ship: 0.6,
        goal: 1.0,
        better: Better::Higher,
    });
    Ok(())
}
