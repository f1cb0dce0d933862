//! `send` and `saturate`: direct messages to connected agents, at a rate and as fast as possible.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{gateway_baseline, live_baseline};
use crate::api::{Agent, Workspace};
use crate::baseline::{Consumers, rows};
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::fleet::{Fleet, nodes};
use crate::posts::{Sender, direct_messages};
use crate::report::{Better, Ratio, Report, Row};
use crate::target::Target;
use crate::window::measure;

/// Latency at `rate` messages a second over `agents` receivers.
pub(crate) async fn send(common: &Common, rate: f64, agents: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let load = Load::paced(rate, common.window());
    let label = format!("{agents} at {rate}/s");
    let gateway = match common.no_baselines {
        true => None,
        false => Some(gateway_baseline(&target, common, agents, &label, &load, report).await?),
    };
    let ours = connected(&target, common, agents, &format!("send {label}"), &load, report).await?;
    let Some(gateway) = gateway else { return Ok(()) };
    let p99 = |index: usize| report.rows[index].latency.map(|latency| latency.p99_ms);
    if let (Some(ours), Some(gateway)) = (p99(ours), p99(gateway))
        && (rate, agents) == (1000.0, 100)
    {
        report.ratios.push(Ratio {
            target: "send",
            what: format!("p99 {ours:.2} ms at 1000 msg/s over 100 agents / baseline gateway p99 {gateway:.2} ms"),
            value: ours / gateway,
            ship: 2.0,
            goal: 1.3,
            better: Better::Lower,
        });
    }
    Ok(())
}

/// As fast as the window allows over one gateway and over two, with as many agents: the cost of a message that two
/// gateways share.
pub(crate) async fn gateways(common: &Common, agents: usize, report: &mut Report) -> Result<()> {
    let load = Load::closed(common.in_flight.into(), common.window());
    let mut costs = Vec::new();
    for count in [1, 2] {
        let target = Target::start(common, count).await?;
        let run = format!("gateways {count}");
        let ours = connected(&target, common, agents, &run, &load, report).await?;
        costs.push(report.rows[ours].cpu_per_100k().unwrap_or(f64::NAN));
    }
    report.ratios.push(Ratio {
        target: "gateways",
        what: format!("CPU s/100k: two gateways {:.1} / one {:.1}", costs[1], costs[0]),
        value: costs[1] / costs[0],
        ship: 1.1,
        goal: 1.0,
        better: Better::Lower,
    });
    Ok(())
}

/// As fast as the window allows, for each number of receivers in turn.
pub(crate) async fn saturate(common: &Common, agents: &[usize], report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let load = Load::closed(common.in_flight.into(), common.window());
    let first = common.scaled(*agents.first().context("saturate how many agents?")?);
    let mut bare = Vec::new();
    let mut gateway = None;
    if !common.no_baselines {
        let label = first.to_string();
        gateway = Some(gateway_baseline(&target, common, first, &label, &load, report).await?);
        report.add(rows(target.stack().postgres(), common.bytes as usize, common.window()).await?);
        for consumers in [common.each(), Consumers::One] {
            let label = first.to_string();
            bare.push(live_baseline(&target, common, consumers, first, &label, &load, report).await?);
        }
    }
    let mut ours = Vec::new();
    for count in agents.iter().map(|count| common.scaled(*count)) {
        // The mailbox limit of an agent bounds the backlog.
        let load = Load { backlog: load.backlog.min(500 * count as u64), ..load.clone() };
        ours.push(connected(&target, common, count, &format!("saturate {count}"), &load, report).await?);
    }
    let rate = |report: &Report, index: usize| report.rows[index].per_second.unwrap_or(0.0);
    let mut ratio = |target, above: usize, below: usize, ship, goal| {
        let (above_rate, below_rate) = (rate(report, above), rate(report, below));
        let (above, below) = (&report.rows[above].run, &report.rows[below].run);
        let what = format!("{above}: {above_rate:.0}/s / {below}: {below_rate:.0}/s");
        let value = above_rate / below_rate;
        report.ratios.push(Ratio { target, what, value, ship, goal, better: Better::Higher });
    };
    if let [each, one] = bare[..] {
        ratio("S1", ours[0], each, 0.4, 0.6);
        ratio("S2", ours[0], one, 0.25, 0.5);
        if let Some(gateway) = gateway {
            // Below 0.7 the baseline itself is disturbed, and the round is void.
            ratio("baseline", gateway, each, 0.7, 0.7);
            ratio("rate", ours[0], gateway, 0.6, 0.8);
        }
    }
    if let [hundred, thousand, ..] = ours[..] {
        ratio("S3", thousand, hundred, 0.95, 0.95);
    }
    let cost = |report: &Report, index: usize| report.rows[index].cpu_per_100k().unwrap_or(f64::NAN);
    let mut cost_ratio = |target, above: usize, below: usize, ship, goal| {
        let (ours, theirs) = (cost(report, above), cost(report, below));
        let what = format!("CPU s/100k: {} {ours:.1} / {} {theirs:.1}", report.rows[above].run, report.rows[below].run);
        report.ratios.push(Ratio { target, what, value: ours / theirs, ship, goal, better: Better::Lower });
    };
    if let (Some(gateway), [each, _]) = (gateway, &bare[..]) {
        cost_ratio("cost", ours[0], gateway, 1.8, 1.3);
        cost_ratio("cost S1", ours[0], *each, 2.8, 2.0);
    }
    Ok(())
}

/// Creates a workspace with `count` connected receivers and measures after a warm-up.
async fn connected(
    target: &Target,
    common: &Common,
    count: usize,
    run: &str,
    load: &Load,
    report: &mut Report,
) -> Result<usize> {
    let scene = Scene::create(target, common, common.senders.into(), count).await?;
    let send = direct_messages(&scene.workspace, &scene.senders, &scene.receivers, common.bytes as usize);
    Ok(report.add(scene.measure(run, load, send).await))
}

/// Workspace with senders and connected receivers.
pub(super) struct Scene<'a> {
    target: &'a Target,
    common: &'a Common,
    pub(super) workspace: Workspace,
    pub(super) senders: Vec<Agent>,
    pub(super) receivers: Vec<Agent>,
    collector: Arc<Collector>,
    _fleet: Fleet,
}

impl<'a> Scene<'a> {
    /// Creates a workspace with at most as many senders as receivers.
    pub(super) async fn create(
        target: &'a Target,
        common: &'a Common,
        senders: usize,
        receivers: usize,
    ) -> Result<Self> {
        let workspace = Workspace::create(&target.urls()).await?;
        let senders = workspace.agents("s", receivers.min(senders)).await?;
        let receivers = workspace.agents("r", receivers).await?;
        let specs = nodes(&workspace, &receivers, common.per_socket.into(), "lt").await?;
        let collector = Arc::new(Collector::default());
        let fleet = Fleet::connect(&workspace, &specs, &collector).await?;
        Ok(Self { target, common, workspace, senders, receivers, collector, _fleet: fleet })
    }

    /// Measures a load after a warm-up.
    pub(super) async fn measure(&self, run: &str, load: &Load, send: impl Sender) -> Row {
        let (collector, common) = (&self.collector, self.common);
        // The first message of each conversation creates it, which is not measured.
        let roots = self.target.roots();
        let first = measure(run, &roots, collector, &Load::counted(64, self.receivers.len()), send.clone()).await;
        let warm = Load { duration: common.warming(), ..load.clone() };
        let warmed = measure(run, &roots, collector, &warm, send.clone()).await;
        // Lets the flushes of the warm-up end, so that their cost is outside the window.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut row = measure(run, &roots, collector, load, send).await;
        row.problems.extend(first.problems.into_iter().chain(warmed.problems));
        let gateways = self.target.urls().len();
        row.notes.insert(0, format!("{gateways} gateways, {} agents a socket", common.per_socket));
        row
    }
}
