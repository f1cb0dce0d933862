//! `fair`: effect of one abusive tenant on the messages of others, in each way of abuse in turn.

pub(crate) mod abuse;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use relay_testkit::names::NameServer;

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::fleet::{Fleet, nodes};
use crate::posts::{Sender, direct_messages};
use crate::report::{Better, Ratio, Report, Row};
use crate::target::Target;
use crate::window::measure;
use abuse::{Abuse, Scene};

/// Other tenants.
const OTHERS: usize = 19;
/// Messages per second of all others.
const RATE: f64 = 50.0;
/// Time from the start of the abuse until its effect is measured.
const LEAD: Duration = Duration::from_secs(2);
/// Pause after a phase, in which what the abuse has caused ends.
const SETTLE: Duration = Duration::from_secs(5);
const GOAL: f64 = 2.0;
/// Ratio and latency of which either suffices for a release.
const SHIP: (f64, f64) = (4.0, 300.0);

/// Runs the load of the others undisturbed, then beside each of `kinds`, or of all of them.
pub(crate) async fn run(common: &Common, kinds: &[Abuse], report: &mut Report) -> Result<()> {
    let names = NameServer::start().await?;
    let mut common = common.clone();
    // Names with a server that never answers, and clients at other addresses; other variables of the command line come
    // last.
    let settings = [
        ("RELAY_EGRESS_NAME_SERVERS", names.address().to_string()),
        ("RELAY_EGRESS_STRICT", "off".to_owned()),
        ("RELAY_TRUSTED_PROXIES", "127.0.0.1".to_owned()),
    ];
    common.env.splice(0..0, settings.map(|(key, value)| (key.to_owned(), value)));
    let target = Target::start(&common, common.gateways.into()).await?;
    let others = Others::connect(&target, &common).await?;
    let load = Load::paced(RATE, common.window());
    let undisturbed = others.measure(&target, "fair, undisturbed", &load).await;
    let base = undisturbed.latency.context("no delivery was measured")?.p99_ms;
    report.add(undisturbed);
    for abuse in if kinds.is_empty() { Abuse::ALL } else { kinds } {
        let scene = Scene::create(&target.urls(), &common).await?;
        let attack = abuse.start(&scene).await.with_context(|| format!("prepare {}", abuse.text()))?;
        tokio::time::sleep(LEAD).await;
        let mut row = others.measure(&target, &format!("fair, {}", abuse.text()), &load).await;
        row.notes.push(attack.outcome());
        drop(attack);
        scene.end().await?;
        if let Some(latency) = row.latency {
            report.ratios.push(Ratio {
                target: "fair",
                what: format!(
                    "{}: p99 of the others {:.1} ms / {base:.1} ms undisturbed",
                    abuse.text(),
                    latency.p99_ms
                ),
                value: latency.p99_ms / base,
                ship: SHIP.0.max(SHIP.1 / base),
                goal: GOAL,
                better: Better::Lower,
            });
        }
        report.add(row);
        tokio::time::sleep(SETTLE).await;
    }
    Ok(())
}

/// Other tenants, each with a sender and a connected receiver.
struct Others<S> {
    collector: Arc<Collector>,
    send: S,
    _fleets: Vec<Fleet>,
}

impl Others<()> {
    async fn connect(target: &Target, common: &Common) -> Result<Others<impl Sender + use<>>> {
        let collector = Arc::new(Collector::default());
        let (mut senders, mut fleets) = (Vec::new(), Vec::new());
        for _ in 0..OTHERS {
            let workspace = Workspace::create(&target.urls()).await?;
            let (from, to) = (workspace.agents("s", 1).await?, workspace.agents("r", 1).await?);
            let specs = nodes(&workspace, &to, 1, "lt").await?;
            fleets.push(Fleet::connect(&workspace, &specs, &collector).await?);
            senders.push(direct_messages(&workspace, &from, &to, common.bytes as usize));
        }
        let senders: Arc<[_]> = senders.into();
        // Each tenant uses all gateways in turn.
        let send = move |number: usize, stamp| senders[number % OTHERS](number / OTHERS, stamp).boxed();
        let others = Others { collector, send, _fleets: fleets };
        let roots = target.roots();
        // The first message of each conversation creates it, which is not measured.
        measure("first", &roots, &others.collector, &Load::counted(8, OTHERS), others.send.clone()).await;
        measure("warm-up", &roots, &others.collector, &Load::paced(RATE, common.warming()), others.send.clone()).await;
        Ok(others)
    }
}

impl<S: Sender> Others<S> {
    async fn measure(&self, target: &Target, run: &str, load: &Load) -> Row {
        let mut row = measure(run, &target.roots(), &self.collector, load, self.send.clone()).await;
        row.notes.insert(0, format!("{OTHERS} tenants, {RATE} posts/s in all"));
        row
    }
}
