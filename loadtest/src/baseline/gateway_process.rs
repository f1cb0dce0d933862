//! The baseline gateway as a process under the load that the engine's gateways get.

use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::api::{Agent, NodeAccess, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::Load;
use crate::fleet::Fleet;
use crate::inbox::Acks;
use crate::posts::direct_messages;
use crate::report::Row;
use crate::socket::NodeSpec;
use crate::target::Target;
use crate::usage::Roots;
use crate::window::measure;

/// Running baseline gateway on the servers of a stack; it ends when this is dropped.
pub(crate) struct GatewayProcess {
    process: Child,
    url: String,
    servers: Roots,
}

impl GatewayProcess {
    /// Starts the process in a database of its own.
    pub(crate) async fn start(target: &Target) -> Result<Self> {
        let stack = target.stack();
        let database = stack.postgres().create_database("loadtest_gateway").await?;
        let mut process = Command::new(std::env::current_exe()?)
            .args(["baseline-gateway", "--database", &database, "--nats", &stack.nats().url()])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start the baseline gateway")?;
        let output = process.stdout.take().context("the baseline gateway has no output")?;
        let url = BufReader::new(output).lines().next_line().await?.context("the baseline gateway ended")?;
        let servers =
            Roots::from([("nats".to_owned(), stack.nats().pid()), ("postgres".to_owned(), stack.postgres().pid())]);
        Ok(Self { process, url, servers })
    }

    /// Returns the gateway as a workspace without agents.
    pub(crate) fn workspace(&self) -> Workspace {
        Workspace::without_key(&self.url)
    }

    /// Returns the processes that serve requests.
    pub(crate) fn roots(&self) -> Result<Roots> {
        let mut roots = self.servers.clone();
        roots.insert("gateway".to_owned(), self.process.id().context("the baseline gateway ended")?);
        Ok(roots)
    }

    /// Measures direct messages to `count` agents with a socket each, as the engine's scenarios do.
    pub(crate) async fn live(&self, common: &Common, count: usize, label: &str, load: &Load) -> Result<Row> {
        let workspace = self.workspace();
        let receivers: Vec<Agent> = (0..count).map(|number| bare_agent(&format!("r-{number}"))).collect();
        let specs: Vec<NodeSpec> = receivers.iter().map(bare_node).collect();
        let collector = Arc::new(Collector::default());
        let _fleet = Fleet::connect(&workspace, &specs, &collector).await?;
        let send = direct_messages(&workspace, &[bare_agent("s")], &receivers, common.bytes as usize);
        let roots = self.roots()?;
        let run = format!("gateway {label}");
        let warm = Load { duration: common.warming(), ..load.clone() };
        let warmed = measure(&run, &roots, &collector, &warm, send.clone()).await;
        let mut row = measure(&run, &roots, &collector, load, send).await;
        row.problems.extend(warmed.problems);
        row.notes.push(format!("{count} agents, a socket each"));
        Ok(row)
    }
}

/// The baseline gateway knows agents by their names only.
fn bare_agent(name: &str) -> Agent {
    Agent { id: name.to_owned(), name: name.to_owned(), token: name.to_owned() }
}

fn bare_node(agent: &Agent) -> NodeSpec {
    let access = NodeAccess { id: agent.id.clone(), name: agent.name.clone(), token: agent.token.clone() };
    NodeSpec { access, broker: false, agents: vec![agent.clone()], acks: Acks::Each, goal: None, received: None }
}
