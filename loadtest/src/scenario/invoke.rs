//! `invoke`: actions placed on nodes that answer at once, at a rate and as a burst.

use std::sync::Arc;

use anyhow::Result;
use futures::FutureExt;

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::invoker::{CAPABILITY, Sockets};
use crate::payload::push_text;
use crate::posts::Sender;
use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;
use crate::target::Target;
use crate::window::measure;

/// Number of calling agents.
const CALLERS: usize = 20;
/// Maximum number of concurrent requests in the burst.
const AT_ONCE: usize = 256;
/// Size of input and output in bytes.
const BYTES: usize = 128;

/// Runs `rate` invocations a second, then `burst` of them at once, over `nodes` nodes.
pub(super) async fn run(common: &Common, nodes: usize, burst: usize, rate: f64, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let callers = workspace.agents("caller", CALLERS).await?;
    let (asked, reported) = (Arc::new(Collector::default()), Arc::new(Collector::default()));
    let _handlers = Sockets::handlers(&workspace, nodes, &asked).await?;
    let direct = workspace.direct_nodes(&callers).await?;
    let _callers = Sockets::callers(&workspace, direct, &reported).await?;
    let send = invocations(&workspace, &callers);

    let warm = Load { duration: common.warming(), ..Load::paced(rate, common.warming()) };
    window("warm-up", &target, (&asked, &reported), &warm, send.clone()).await;
    let paced = Load::paced(rate, common.window());
    let (paced, to_frame) =
        window(&format!("invoke at {rate}/s over {nodes} nodes"), &target, (&asked, &reported), &paced, send.clone())
            .await;
    // CPU seconds of 100 000 outcomes are hundredths of a millisecond of each.
    let cpu_ms = paced.cpu_per_100k().map(|seconds| seconds / 100.0);
    report.add(paced);
    let load = Load::counted(AT_ONCE, burst);
    let (burst_row, burst_to_frame) =
        window(&format!("invoke {burst} at once over {nodes} nodes"), &target, (&asked, &reported), &load, send).await;
    report.add(burst_row);
    let mut ratio = |target, what, value: Option<f64>, ship, goal| {
        if let Some(value) = value {
            report.ratios.push(Ratio { target, what, value, ship, goal, better: Better::Lower });
        }
    };
    let p99 = |latency: Option<Latency>| latency.map(|latency| latency.p99_ms);
    ratio("invoke CPU", format!("ms of CPU of an invocation at {rate}/s"), cpu_ms, 1.5, 0.7);
    ratio("invoke p99", format!("p99 from invoke to frame in ms at {rate}/s"), p99(to_frame), 50.0, 20.0);
    ratio("invoke burst", format!("p99 to the frame in ms, burst of {burst}"), p99(burst_to_frame), 150.0, 50.0);
    Ok(())
}

/// Measures one window. The row's latency is from the request to the outcome at the caller; also returns that to the
/// frame at the node.
async fn window(
    run: &str,
    target: &Target,
    (asked, reported): (&Arc<Collector>, &Arc<Collector>),
    load: &Load,
    send: impl Sender,
) -> (Row, Option<Latency>) {
    asked.reset(crate::payload::now_micros());
    let mut row = measure(run, &target.roots(), reported, load, send).await;
    let to_frame = Latency::from_micros(asked.take_samples());
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
