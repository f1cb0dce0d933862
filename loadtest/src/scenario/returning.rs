//! `returning`: the gateway with the sockets of direct agents is killed; each asks the other one for a token and connects.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::{StreamExt, stream};
use tokio::time::{Instant, sleep};

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::fleet::{Fleet, nodes};
use crate::report::{Better, Ratio, Report};
use crate::socket::NodeSocket;
use crate::target::Target;
use crate::window::Window;

/// Agents that return at the same time.
const AT_ONCE: usize = 512;
/// Delay before a refused agent tries again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Time after which agents that have not returned are reported as missing.
const GIVE_UP: Duration = Duration::from_secs(90);

/// Connects `agents` of one workspace with a socket each; measures from the kill until all are registered again.
pub(crate) async fn run(common: &Common, agents: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, 2).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let all = workspace.agents("a", agents).await?;
    let specs = nodes(&workspace, &all, 1, "lt").await?;
    let collector = Arc::new(Collector::default());
    let fleet = Fleet::connect(&workspace.through_gateway(0), &specs, &collector).await?;

    // A separate collector, so that the end of the old sockets is not counted as a problem.
    let collector = Arc::new(Collector::default());
    let roots = target.roots();
    let window = Window::open_for_old(&roots, &collector);
    target.stack().gateway(0).kill9();
    drop(fleet);
    let began = Instant::now();
    let deadline = began + GIVE_UP;
    let other = workspace.through_gateway(1);
    let returned = all.iter().map(|agent| come_back(&other, agent, &collector, deadline));
    let returned: Vec<Option<NodeSocket>> = stream::iter(returned).buffer_unordered(AT_ONCE).collect().await;
    let took = began.elapsed().as_secs_f64();
    let mut row = window.close(format!("returning {agents}"));
    (row.seconds, row.latency) = (took, None);
    let back = returned.iter().flatten().count();
    if back < agents {
        row.problems.push(format!("{} agents did not return within {GIVE_UP:?}", agents - back));
    }
    let per_second = back as f64 / took;
    row.figures.insert("returned_per_second".into(), per_second);
    row.notes
        .push(format!("{per_second:.0} agents a second, from kill -9 to the last registration, with a token each"));
    report.add(row);
    report.ratios.push(Ratio {
        target: "returns",
        what: format!("direct agents of one workspace that return per second, {agents} in all"),
        value: per_second,
        ship: 1000.0,
        goal: 2500.0,
        better: Better::Higher,
    });
    Ok(())
}

/// Takes a new token and connects, until it succeeds or the deadline has passed.
async fn come_back(
    gateway: &Workspace,
    agent: &Agent,
    collector: &Arc<Collector>,
    deadline: Instant,
) -> Option<NodeSocket> {
    while Instant::now() < deadline {
        if let Ok(specs) = nodes(gateway, std::slice::from_ref(agent), 1, "lt").await
            && let Some(spec) = specs.first()
            && let Ok(socket) = NodeSocket::open(gateway.pool(0).address(), spec, Arc::clone(collector)).await
        {
            return Some(socket);
        }
        sleep(RETRY_PAUSE).await;
    }
    None
}
