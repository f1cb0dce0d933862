//! Command line of the load generator.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::baseline::Consumers;
use crate::payload::SMALLEST;
use crate::scenario::fair::abuse::Abuse;

/// Starts an engine, puts it under load, and compares it with the bare servers.
#[derive(Debug, Parser)]
#[command(name = "relay-loadtest")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) scenario: Scenario,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// Options of every scenario.
#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// Number of gateways; REST calls and sockets are spread over them.
    #[arg(long, global = true, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) gateways: u16,
    /// Length of a measured window in seconds.
    #[arg(long, global = true, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) seconds: u64,
    /// Unmeasured load before each window, in seconds.
    #[arg(long, global = true, default_value_t = 3, value_parser = clap::value_parser!(u64).range(0..=120))]
    pub(crate) warm_up: u64,
    /// Text size of a message in bytes.
    #[arg(long, global = true, default_value_t = 512, value_parser = clap::value_parser!(u32).range(i64::from(SMALLEST)..=200_000))]
    pub(crate) bytes: u32,
    /// Maximum number of concurrent requests in scenarios without a fixed rate.
    #[arg(long, global = true, default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) in_flight: u16,
    /// Number of sending agents.
    #[arg(long, global = true, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) senders: u16,
    /// Agents per socket; 1 connects direct nodes that ack each frame, more connects brokers with cumulative acks.
    #[arg(long, global = true, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) per_socket: u16,
    /// js-each: messages per pull request.
    #[arg(long, global = true, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) each_pull: u16,
    /// js-each: wait for the server to confirm each ack before the next message.
    #[arg(long, global = true)]
    pub(crate) each_confirmed: bool,
    /// Skip the baselines and the ratios to them.
    #[arg(long, global = true)]
    pub(crate) no_baselines: bool,
    /// Use a tenth of the agents and windows of 2 s, to check that the scenario works rather than its speed.
    #[arg(long, global = true)]
    pub(crate) small: bool,
    /// Also write the report to this file as JSON.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Stop after this many seconds and print the results so far.
    #[arg(long, global = true, default_value_t = 1200, value_parser = clap::value_parser!(u64).range(1..=7200))]
    pub(crate) limit: u64,
    /// Set an environment variable of gateways and workers; may be repeated.
    #[arg(long, global = true, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) env: Vec<(String, String)>,
    /// Keep data and logs in this folder instead of a temporary one.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

impl Common {
    /// Returns the `js-each` baseline as configured.
    pub(crate) fn each(&self) -> Consumers {
        Consumers::Each { pull: self.each_pull.into(), confirmed: self.each_confirmed }
    }

    pub(crate) fn window(&self) -> Duration {
        Duration::from_secs(if self.small { self.seconds.min(2) } else { self.seconds })
    }

    pub(crate) fn warming(&self) -> Duration {
        Duration::from_secs(if self.small { self.warm_up.min(1) } else { self.warm_up })
    }

    /// Returns `count`, or a tenth of it in a small run.
    pub(crate) fn scaled(&self, count: usize) -> usize {
        if self.small { count.div_ceil(10) } else { count }
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Scenario to run.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Scenario {
    /// Measure the bare servers only: js-each, js-one, pg.
    Baselines {
        /// Number of agents of js-each and js-one.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Measure latency at a fixed rate, by default with one receiver.
    Send {
        /// Messages per second.
        #[arg(long, default_value_t = 200.0)]
        rate: f64,
        /// Number of receivers.
        #[arg(long, default_value_t = 1)]
        agents: usize,
    },
    /// Send direct messages as fast as the limit of concurrent requests allows.
    Saturate {
        /// Numbers of connected receivers; each number is one window.
        #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
        agents: Vec<usize>,
    },
    /// Compare the cost of a message over one gateway and over two.
    Gateways {
        /// Number of connected receivers.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Send direct messages as in `saturate`, in batches.
    Batch {
        /// Number of connected receivers.
        #[arg(long, default_value_t = 100)]
        agents: usize,
        /// Posts of a batch at most.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=100))]
        posts: u16,
        /// Number of senders, each with one batch in flight.
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
        senders_at_once: u16,
    },
    /// Post into one channel with connected members.
    Fanout {
        /// Numbers of members; each number is one window.
        #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
        members: Vec<usize>,
        /// Maximum number of concurrent posts.
        #[arg(long, default_value_t = 16)]
        posts_in_flight: usize,
    },
    /// Kill the gateway with all sockets (SIGKILL); the sockets resume on another.
    Reconnect {
        /// Number of agents.
        #[arg(long, default_value_t = 10_000)]
        agents: usize,
        /// Agents per broker socket.
        #[arg(long, default_value_t = 100)]
        on_each_socket: usize,
        /// Deliveries per agent that were received and not acked.
        #[arg(long, default_value_t = 10)]
        unacked: usize,
    },
    /// Kill the gateway with the sockets of direct agents (SIGKILL); each takes a new token and connects to another.
    Returning {
        /// Number of agents.
        #[arg(long, default_value_t = 5_000)]
        agents: usize,
    },
    /// Restart every gateway and worker in turn under a load of direct messages; compared with the same load without
    /// restarts.
    Rolling {
        /// Messages per second; 0 sends as fast as the limit of concurrent requests allows.
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
        /// Number of connected receivers, which reconnect to another gateway.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Accept messages for disconnected agents, then connect all agents.
    Replay {
        /// Number of messages.
        #[arg(long, default_value_t = 10_000)]
        messages: usize,
        /// Number of receiving agents.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Measure gateway memory per idle connected agent, and the CPU that idle agents cost.
    Idle {
        /// Number of agents on broker sockets, 100 per socket.
        #[arg(long, default_value_t = 10_000)]
        agents: usize,
        /// Number of agents with their own socket.
        #[arg(long, default_value_t = 5_000)]
        direct_agents: usize,
    },
    /// Measure deliveries of a busy workspace without observers, then with many.
    Observe {
        /// Number of observers of the workspace.
        #[arg(long, default_value_t = 1000)]
        observers: usize,
        /// Messages per second.
        #[arg(long, default_value_t = 10.0)]
        rate: f64,
        /// Number of connected receivers.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Deliver to HTTP endpoints; compared with a plain HTTP client loop.
    Push {
        /// Number of endpoints, with one agent each.
        #[arg(long, default_value_t = 100)]
        endpoints: usize,
        /// Deliveries per endpoint; a mailbox holds 1000.
        #[arg(long, default_value_t = 400)]
        each: usize,
    },
    /// List and search many messages and read the inbox.
    Read {
        /// Number of messages.
        #[arg(long, default_value_t = 1_000_000)]
        messages: usize,
    },
    /// Invoke actions on nodes that answer at once, at a rate and as a burst.
    Invoke {
        /// Number of nodes.
        #[arg(long, default_value_t = 20)]
        nodes: usize,
        /// Invocations in the burst.
        #[arg(long, default_value_t = 1000)]
        burst: usize,
        /// Invocations per second before the burst.
        #[arg(long, default_value_t = 200.0)]
        rate: f64,
    },
    /// Simulate the placement of bursts of invocations on equal nodes, without starting servers.
    Placement {
        /// Number of nodes.
        #[arg(long, default_value_t = 10_000)]
        nodes: usize,
        /// Invocations per burst.
        #[arg(long, default_value_t = 100_000)]
        burst: usize,
    },
    /// Disturb 19 tenants by a 20th that abuses the engine in one way after the other.
    Fair {
        /// Ways of abuse; all if none is given.
        #[arg(long, value_enum, value_delimiter = ',')]
        abuse: Vec<Abuse>,
    },
    /// Compare our broker with the published one: spawns, injections, memory, CPU, latency. Both share the engine.
    Node {
        /// Program of the published broker; without it only ours is measured.
        #[arg(long, value_name = "FILE")]
        published: Option<PathBuf>,
        /// Agents on the node.
        #[arg(long, default_value_t = 50)]
        agents: usize,
        /// Messages in each measurement; to all agents at once, a tenth of them.
        #[arg(long, default_value_t = 500)]
        messages: usize,
        /// Rounds; the order of the brokers alternates.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Serve as the baseline gateway; started by the scenarios that compare with it.
    #[command(hide = true)]
    BaselineGateway {
        /// URL of an empty database.
        #[arg(long)]
        database: String,
        /// URL of a NATS server.
        #[arg(long)]
        nats: String,
    },
    /// Run the scenarios that are compared with a baseline, with their defaults: all but `rolling`, `observe`,
    /// `placement`, `fair` and `node`, and `read` with a tenth of its messages.
    All,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
        let cli = Cli::parse_from(["x", "saturate", "--agents", "10,20", "--seconds", "5", "--env", "A=b=c"]);
        assert!(matches!(cli.scenario, Scenario::Saturate { agents } if agents == [10, 20]));
        assert_eq!(cli.common.env, [("A".to_owned(), "b=c".to_owned())]);
        assert!(Cli::try_parse_from(["x", "send", "--gateways", "0"]).is_err());
    }

    #[test]
    fn a_small_run_is_a_tenth() {
        let mut common = Cli::parse_from(["x", "all"]).common;
        assert_eq!((common.scaled(1000), common.window().as_secs()), (1000, 10));
        common.small = true;
        assert_eq!((common.scaled(1000), common.scaled(1), common.window().as_secs()), (100, 1, 2));
    }
}
