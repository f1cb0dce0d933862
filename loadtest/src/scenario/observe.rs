//! `observe`: effect of observers on the deliveries of a busy workspace.

use std::sync::{Arc, atomic::Ordering};

use anyhow::Result;

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::fleet::{Fleet, nodes};
use crate::observer::Observers;
use crate::posts::direct_messages;
use crate::report::{Better, Ratio, Report};
use crate::target::Target;
use crate::window::measure;

/// Runs the same load without observers, then with `observers` of them.
pub(crate) async fn run(
    common: &Common,
    observers: usize,
    rate: f64,
    agents: usize,
    report: &mut Report,
) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let senders = workspace.agents("s", agents.min(common.senders.into())).await?;
    let receivers = workspace.agents("r", agents).await?;
    let specs = nodes(&workspace, &receivers, common.per_socket.into(), "lt").await?;
    let collector = Arc::new(Collector::default());
    let _fleet = Fleet::connect(&workspace, &specs, &collector).await?;
    let send = direct_messages(&workspace, &senders, &receivers, common.bytes as usize);
    let roots = target.roots();
    let load = Load::paced(rate, common.window());
    let warm = Load { duration: common.warming(), ..load.clone() };
    measure("warm-up", &roots, &collector, &Load::counted(64, agents), send.clone()).await;
    measure("warm-up", &roots, &collector, &warm, send.clone()).await;
    let mut without = measure(&format!("observe 0 at {rate}/s"), &roots, &collector, &load, send.clone()).await;
    without.notes.insert(0, format!("{agents} agents, {} gateways", target.urls().len()));

    let watching = Observers::connect(&workspace, workspace.key(), observers).await?;
    measure("warm-up", &roots, &collector, &warm, send.clone()).await;
    let before = watching.seen.frames.load(Ordering::Relaxed);
    let mut with = measure(&format!("observe {observers} at {rate}/s"), &roots, &collector, &load, send).await;
    let frames = watching.seen.frames.load(Ordering::Relaxed) - before;
    let (gaps, closed) = (watching.seen.gaps.load(Ordering::Relaxed), watching.seen.closed.load(Ordering::Relaxed));
    with.notes.push(format!("{frames} frames to observers"));
    if with.seconds > 0.0 {
        with.figures.insert("observer_frames_per_second".into(), frames as f64 / with.seconds);
    }
    if gaps + closed > 0 {
        with.problems.push(format!("observers saw {gaps} gaps, {closed} were closed"));
    }
    if let (Some(with), Some(without)) = (with.latency, without.latency) {
        report.ratios.push(Ratio {
            target: "observe",
            what: format!(
                "delivery p99 {:.2} ms with {observers} observers / {:.2} ms without",
                with.p99_ms, without.p99_ms
            ),
            value: with.p99_ms / without.p99_ms,
            ship: 1.2,
            goal: 1.1,
            better: Better::Lower,
        });
    }
    report.add(without);
    report.add(with);
    Ok(())
}
