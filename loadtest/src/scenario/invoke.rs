//! `invoke`: actions placed on nodes that answer at once, at a rate and as a burst, compared with the same burst of
//! bare NATS requests to as many responders.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures::{FutureExt, StreamExt};
use tokio::task::JoinSet;

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::invoker::{CAPABILITY, Sockets};
use crate::payload::{push_text, sent_at};
use crate::posts::Sender;
use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;
use crate::target::Target;
use crate::window::measure;

/// Number of calling agents.
const CALLERS: usize = 20;
/// Maximum number of concurrent requests in the burst, of both kinds.
const AT_ONCE: usize = 256;
/// Size of input and output in bytes.
const BYTES: usize = 128;

/// Runs `rate` invocations a second, then `burst` of them at once, over `nodes` nodes.
pub(super) async fn run(common: &Common, nodes: usize, burst: usize, rate: f64, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let callers = workspace.agents("caller", CALLERS).await?;
    let (asked, told) = (Arc::new(Collector::default()), Arc::new(Collector::default()));
    let _handlers = Sockets::handlers(&workspace, nodes, &asked).await?;
    let direct = workspace.direct_nodes(&callers).await?;
    let _callers = Sockets::callers(&workspace, direct, &told).await?;
    let send = invocations(&workspace, &callers);

    let warm = Load { duration: common.warming(), ..Load::paced(rate, common.warming()) };
    window("warm-up", &target, (&asked, &told), &warm, send.clone()).await;
    let paced = Load::paced(rate, common.window());
    let (paced, to_frame) =
        window(&format!("invoke at {rate}/s over {nodes} nodes"), &target, (&asked, &told), &paced, send.clone()).await;
    report.add(paced);
    let load = Load::counted(AT_ONCE, burst);
    let (ours, _) =
        window(&format!("invoke {burst} at once over {nodes} nodes"), &target, (&asked, &told), &load, send).await;
    let seconds = ours.seconds;
    report.add(ours);
    if let Some(to_frame) = to_frame {
        let what = format!("p99 from invoke to frame in ms at {rate}/s");
        let value = to_frame.p99_ms;
        report.ratios.push(Ratio { target: "invoke p99", what, value, ship: 50.0, goal: 20.0, better: Better::Lower });
    }
    if common.no_baselines {
        return Ok(());
    }
    let bare = bare_requests(target.stack().nats_url(), nodes, burst).await?;
    let what = format!("{burst} invocations in {seconds:.2} s ÷ as many NATS requests in {:.2} s", bare.seconds);
    let value = seconds / bare.seconds;
    report.add(bare);
    report.ratios.push(Ratio { target: "invoke burst", what, value, ship: 20.0, goal: 5.0, better: Better::Lower });
    Ok(())
}

/// Measures one window. The row's latency is from the request to the outcome at the caller; also returns that to the
/// frame at the node.
async fn window(
    run: &str,
    target: &Target,
    (asked, told): (&Arc<Collector>, &Arc<Collector>),
    load: &Load,
    send: impl Sender,
) -> (Row, Option<Latency>) {
    asked.reset(crate::payload::now_micros());
    let mut row = measure(run, &target.roots(), told, load, send).await;
    let to_frame = Latency::of(asked.take_samples());
    if let Some(latency) = to_frame {
        row.notes.insert(0, format!("to frame p50 {:.2} p99 {:.2} ms", latency.p50_ms, latency.p99_ms));
        row.figures.insert("to_frame_p50_ms".to_owned(), latency.p50_ms);
        row.figures.insert("to_frame_p99_ms".to_owned(), latency.p99_ms);
    }
    let frames = asked.delivered_count();
    if frames != row.delivered {
        row.problems.push(format!("{frames} frames for {} outcomes", row.delivered));
    }
    row.problems.extend(asked.problems());
    (row, to_frame)
}

/// Sends one invocation by each of the agents in turn.
fn invocations(workspace: &Workspace, callers: &[Agent]) -> impl Sender + use<> {
    let (workspace, callers): (_, Arc<[Agent]>) = (workspace.clone(), callers.into());
    let path: Arc<str> = format!("/v1/actions/{CAPABILITY}/invoke").into();
    move |number, stamp| {
        let (workspace, callers, path) = (workspace.clone(), Arc::clone(&callers), Arc::clone(&path));
        async move {
            let caller = &callers[number % callers.len()];
            let mut body = String::from(r#"{"input":{"text":""#);
            push_text(&mut body, stamp, BYTES);
            body.push_str("\"}}");
            workspace.pool(number / callers.len()).post(&path, Some(&caller.token), &body).await?.success()?;
            Ok(())
        }
        .boxed()
    }
}

/// Sends `count` requests over `responders` subjects with the same concurrency, each answered with its body.
async fn bare_requests(url: String, responders: usize, count: usize) -> Result<Row> {
    let server = async_nats::connect(&url).await.context("connect the responders")?;
    let mut tasks = JoinSet::new();
    for number in 0..responders {
        let mut requests = server.subscribe(format!("bare.{number}")).await?;
        let server = server.clone();
        tasks.spawn(async move {
            while let Some(request) = requests.next().await {
                if let Some(reply) = request.reply {
                    let _ = server.publish(reply, request.payload).await;
                }
            }
        });
    }
    server.flush().await?;
    let client = async_nats::connect(&url).await.context("connect the requester")?;
    let collector = Arc::new(Collector::default());
    let send = {
        let (client, collector) = (client.clone(), Arc::clone(&collector));
        move |number: usize, stamp: u64| {
            let (client, collector) = (client.clone(), Arc::clone(&collector));
            async move {
                let mut body = String::new();
                push_text(&mut body, stamp, BYTES);
                let subject = format!("bare.{}", number % responders);
                let answer = client.request(subject, body.into()).await?;
                collector.delivered(sent_at(std::str::from_utf8(&answer.payload)?));
                Ok(())
            }
        }
    };
    let load = Load::counted(AT_ONCE, count);
    Ok(measure(&format!("bare NATS, {count} at once"), &Default::default(), &collector, &load, send).await)
}
