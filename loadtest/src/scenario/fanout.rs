//! `fanout`: posts into one channel; every member but the poster gets each of them.

use std::sync::Arc;

use anyhow::Result;

use crate::api::Workspace;
use crate::baseline::rows;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::fleet::{Fleet, nodes};
use crate::posts::channel_posts;
use crate::report::{Better, Ratio, Report};
use crate::target::Target;
use crate::window::measure;

/// For each number of members in turn.
pub(crate) async fn run(common: &Common, members: &[usize], in_flight: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let bare = match common.no_baselines {
        true => None,
        false => Some(report.add(rows(target.stack().postgres(), common.bytes as usize, common.window()).await?)),
    };
    for count in members.iter().map(|count| common.scaled(*count)) {
        let workspace = Workspace::create(&target.urls()).await?;
        let owner = workspace.agents("owner", 1).await?.swap_remove(0);
        let agents = workspace.agents("m", count).await?;
        workspace.channel("fanout", &owner, &agents).await?;
        let specs = nodes(&workspace, &agents, common.per_socket.into(), "lt").await?;
        let collector = Arc::new(Collector::default());
        let _fleet = Fleet::connect(&workspace, &specs, &collector).await?;
        let send = channel_posts(&workspace, &[("fanout".to_owned(), owner)], common.bytes as usize);

        let fan_out = count as u64;
        // At most 20 posts wait for any member.
        let load = Load { fan_out, backlog: 20 * fan_out, ..Load::closed(in_flight, common.window()) };
        let run = format!("fanout {count}");
        let warm = Load { duration: common.warming(), ..load.clone() };
        let warmed = measure(&run, &target.roots(), &collector, &warm, send.clone()).await;
        let mut row = measure(&run, &target.roots(), &collector, &load, send).await;
        row.problems.extend(warmed.problems);
        if row.seconds > 0.0 {
            let posts = row.accepted as f64 / row.seconds;
            row.figures.insert("posts_per_second".into(), posts);
            row.notes.push(format!("{posts:.0} posts/s"));
        }
        row.notes.push(format!("{} gateways, {} agents a socket", target.urls().len(), common.per_socket));
        let ours = report.add(row);
        let rate = |index: usize| report.rows[index].per_second.unwrap_or(0.0);
        if let (Some(bare), 1000) = (bare, count) {
            let (ours, bare) = (rate(ours), rate(bare));
            let what = format!("fan-out to 1000 members: {ours:.0} rows/s / pg: {bare:.0} rows/s");
            let value = ours / bare;
            report.ratios.push(Ratio {
                target: "fan-out",
                what,
                value,
                ship: 0.12,
                goal: 0.25,
                better: Better::Higher,
            });
        }
    }
    Ok(())
}
