//! `push`: pending deliveries to endpoints that become available at once, compared with two plain loops that post as
//! many bodies of the same size to the same endpoints: one with an ordinary HTTP client, one with this generator's
//! minimal client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use serde_json::json;

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::endpoint::Endpoints;
use crate::http::Pool;
use crate::posts::direct_messages;
use crate::report::{Better, Ratio, Report, Row};
use crate::target::Target;
use crate::usage::{Sample, resident_kib};

/// Size of a delivery's body without its text, approximately.
const BODY_AROUND_TEXT: usize = 900;
/// Time from binding the agents to the last delivery.
const WITHIN: Duration = Duration::from_secs(300);

/// Delivers `each` deliveries to each of `endpoints`.
pub(crate) async fn run(common: &Common, endpoints: usize, each: usize, report: &mut Report) -> Result<()> {
    let mut common = common.clone();
    // One workspace calls one host here, faster than it may in production.
    let limits = [("RELAY_DESTINATION_CALL_RATE", "1000000"), ("RELAY_DESTINATION_BYTE_RATE", "10737418240")];
    common.env.splice(0..0, limits.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let common = &common;
    let target = Target::start(common, common.gateways.into()).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let senders = workspace.agents("s", endpoints.min(common.senders.into())).await?;
    let receivers = workspace.agents("r", endpoints).await?;
    let total = (endpoints * each) as u64;

    // They wait in the mailboxes, because no node is bound.
    let send = direct_messages(&workspace, &senders, &receivers, common.bytes as usize);
    let collector = Arc::new(Collector::default());
    let sent = drive(&Load::counted(common.in_flight.into(), endpoints * each), &collector, send).await;

    let listening = Endpoints::start(endpoints).await?;
    for number in 0..endpoints {
        let delivery = json!({ "url": format!("{}/e/{number}", listening.base()), "ack_mode": "on_2xx" });
        workspace.push_node(&format!("push-{number}"), delivery).await?;
    }
    let roots = target.roots();
    let (before, began) = (Sample::now(&roots), Instant::now());
    let binds = receivers.iter().enumerate().map(|(number, receiver)| {
        let workspace = workspace.clone();
        async move { workspace.bind(&format!("push-{number}"), std::slice::from_ref(receiver)).await }
    });
    try_join_all(binds).await?;
    let all = tokio::time::timeout(WITHIN, listening.wait_for(sent.accepted)).await;
    let seconds = began.elapsed().as_secs_f64();
    let cpu = Sample::now(&roots).since(&before);
    let delivered = listening.calls();
    let mut row = Row {
        run: format!("push {each} to each of {endpoints}"),
        delivered,
        seconds,
        per_second: Some(delivered as f64 / seconds),
        cpu,
        resident_kib: resident_kib(&roots),
        problems: listening.problems(),
        ..Row::default()
    };
    row.add_sent(sent);
    if all.is_err() {
        row.problems.push(format!("only {delivered} of {total} deliveries came"));
    }
    let cpu_per_1000 = row.cpu.stack_total() * 1000.0 / delivered.max(1) as f64;
    row.figures.insert("cpu_seconds_per_1000".into(), cpu_per_1000);
    row.notes.push(format!("{cpu_per_1000:.3} CPU s for 1000"));
    let pushed = row.per_second;
    report.add(row);

    if !common.no_baselines {
        let bytes = common.bytes as usize + BODY_AROUND_TEXT;
        for (client, target) in [(Client::Ordinary, "push"), (Client::Bare, "push, bare client")] {
            let plain = plain_loop(client, endpoints, each, bytes).await?;
            if let (Some(pushed), Some(plain)) = (pushed, plain.per_second) {
                report.ratios.push(Ratio {
                    target,
                    what: format!("{pushed:.0} dispatches/s / {plain:.0} of a plain loop of {}", client.name()),
                    value: pushed / plain,
                    ship: 0.6,
                    goal: 0.8,
                    better: Better::Higher,
                });
            }
            report.add(plain);
        }
    }
    Ok(())
}

/// HTTP client of a plain loop.
#[derive(Clone, Copy)]
enum Client {
    /// `reqwest` with a persistent connection to each endpoint.
    Ordinary,
    /// The generator's own client, directly over sockets.
    Bare,
}

impl Client {
    const fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "reqwest",
            Self::Bare => "a bare client",
        }
    }

    /// Posts `each` bodies to one path, one after the other.
    async fn post(self, base: String, path: String, body: Arc<str>, each: usize) -> Result<()> {
        match self {
            Self::Ordinary => {
                let client = reqwest::Client::new();
                for _ in 0..each {
                    let request = client.post(format!("{base}{path}")).header("content-type", "application/json");
                    let answer = request.body(body.to_string()).send().await?.error_for_status()?;
                    answer.bytes().await?;
                }
            }
            Self::Bare => {
                let pool = Pool::new(&base);
                for _ in 0..each {
                    pool.post(&path, None, &body).await?.success()?;
                }
            }
        }
        Ok(())
    }
}

/// One connection to each endpoint, with one call at a time.
async fn plain_loop(client: Client, endpoints: usize, each: usize, bytes: usize) -> Result<Row> {
    let listening = Endpoints::start(endpoints).await?;
    let body: Arc<str> = format!(r#"{{"text":"{}"}}"#, "x".repeat(bytes)).into();
    let roots = std::collections::BTreeMap::new();
    let (before, began) = (Sample::now(&roots), Instant::now());
    let loops = (0..endpoints)
        .map(|number| tokio::spawn(client.post(listening.base(), format!("/e/{number}"), Arc::clone(&body), each)));
    for ended in try_join_all(loops).await.context("a loop ended")? {
        ended?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let delivered = listening.calls();
    Ok(Row {
        run: format!("loop of {} {each} to each of {endpoints}", client.name()),
        delivered,
        seconds,
        per_second: Some(delivered as f64 / seconds),
        cpu: Sample::now(&roots).since(&before),
        ..Row::default()
    })
}
