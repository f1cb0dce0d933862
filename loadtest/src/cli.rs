//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::baseline::Consumers;
use crate::payload::SMALLEST;

/// Starts an engine of its own, puts it under load, and measures the bare servers beside it.
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
    /// Gateways of the stack. REST calls and sockets are spread over them.
    #[arg(long, global = true, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) gateways: u16,
    /// Length of a measured window.
    #[arg(long, global = true, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) seconds: u64,
    /// Unmeasured load before it.
    #[arg(long, global = true, default_value_t = 3, value_parser = clap::value_parser!(u64).range(0..=120))]
    pub(crate) warm_up: u64,
    /// Size of a message's text in bytes.
    #[arg(long, global = true, default_value_t = 512, value_parser = clap::value_parser!(u32).range(i64::from(SMALLEST)..=200_000))]
    pub(crate) bytes: u32,
    /// Requests under way at once, where a scenario sends as fast as it can.
    #[arg(long, global = true, default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) in_flight: u16,
    /// Agents that send.
    #[arg(long, global = true, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) senders: u16,
    /// Agents a socket: 1 connects direct nodes that ack each frame, more connects brokers with cumulative acks.
    #[arg(long, global = true, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) per_socket: u16,
    /// js-each: messages that one pull request asks for.
    #[arg(long, global = true, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) each_pull: u16,
    /// js-each: waits for the server to confirm each ack before the next message is taken.
    #[arg(long, global = true)]
    pub(crate) each_confirmed: bool,
    /// Leaves the baselines out, and with them the ratios.
    #[arg(long, global = true)]
    pub(crate) no_baselines: bool,
    /// A tenth of the agents and 2 s windows: shows that everything works, not how fast it is.
    #[arg(long, global = true)]
    pub(crate) small: bool,
    /// Writes the report there, too.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Gives up after this many seconds and prints what was measured so far.
    #[arg(long, global = true, default_value_t = 1200, value_parser = clap::value_parser!(u64).range(1..=7200))]
    pub(crate) limit: u64,
    /// Sets a variable for gateways and worker.
    #[arg(long, global = true, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) env: Vec<(String, String)>,
    /// Keeps data and logs there instead of in a temporary folder.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

impl Common {
    /// The `js-each` baseline as asked for.
    pub(crate) fn each(&self) -> Consumers {
        Consumers::Each { pull: self.each_pull.into(), confirmed: self.each_confirmed }
    }

    /// Length of a measured window.
    pub(crate) fn window(&self) -> Duration {
        Duration::from_secs(if self.small { self.seconds.min(2) } else { self.seconds })
    }

    /// Unmeasured load before it.
    pub(crate) fn warming(&self) -> Duration {
        Duration::from_secs(if self.small { self.warm_up.min(1) } else { self.warm_up })
    }

    /// `count`, or a tenth of it in a small run.
    pub(crate) fn scaled(&self, count: usize) -> usize {
        if self.small { count.div_ceil(10) } else { count }
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// What to run.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Scenario {
    /// The bare servers only: js-each, js-one, pg.
    Baselines {
        /// Agents of js-each and js-one.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Latency at a fixed rate; one sender and one receiver unless told otherwise.
    Send {
        /// Messages a second.
        #[arg(long, default_value_t = 200.0)]
        rate: f64,
        /// Receivers.
        #[arg(long, default_value_t = 1)]
        agents: usize,
    },
    /// Direct messages one to one, as fast as the window allows.
    Saturate {
        /// Connected receivers; one window for each.
        #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
        agents: Vec<usize>,
    },
    /// Posts into one channel whose members are all connected.
    Fanout {
        /// Members; one window for each.
        #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
        members: Vec<usize>,
        /// Posts under way at once.
        #[arg(long, default_value_t = 16)]
        posts_in_flight: usize,
    },
    /// `kill -9` of the gateway that holds all sockets; they resume on another.
    Reconnect {
        /// Agents.
        #[arg(long, default_value_t = 10_000)]
        agents: usize,
        /// Of them, on each broker socket.
        #[arg(long, default_value_t = 100)]
        on_each_socket: usize,
        /// Deliveries that each has received and not acked.
        #[arg(long, default_value_t = 10)]
        unacked: usize,
    },
    /// Every gateway and worker is restarted, one after the other, under direct messages; beside the same load without that.
    Rolling {
        /// Messages a second; 0: as fast as the window allows.
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
        /// Connected receivers, which come back to another gateway.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Messages accepted while nobody was connected, then everybody connects.
    Replay {
        /// Messages.
        #[arg(long, default_value_t = 10_000)]
        messages: usize,
        /// Over this many agents.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Gateway memory for each connected agent that does nothing.
    Idle {
        /// Agents, 100 on each broker socket.
        #[arg(long, default_value_t = 10_000)]
        agents: usize,
        /// Agents with a socket each.
        #[arg(long, default_value_t = 5_000)]
        direct_agents: usize,
    },
    /// Deliveries of a busy workspace without observers, then with many.
    Observe {
        /// Observers, all of one workspace.
        #[arg(long, default_value_t = 1000)]
        observers: usize,
        /// Messages a second.
        #[arg(long, default_value_t = 10.0)]
        rate: f64,
        /// Connected receivers.
        #[arg(long, default_value_t = 100)]
        agents: usize,
    },
    /// Deliveries posted to HTTP endpoints, and a plain HTTP client loop beside it.
    Push {
        /// Endpoints, one agent each.
        #[arg(long, default_value_t = 100)]
        endpoints: usize,
        /// Deliveries to each; a mailbox holds 1000.
        #[arg(long, default_value_t = 400)]
        each: usize,
    },
    /// Listing, searching and the inbox over many messages.
    Read {
        /// Messages.
        #[arg(long, default_value_t = 1_000_000)]
        messages: usize,
    },
    /// Actions invoked on nodes that answer at once: at a rate, then as a burst beside bare NATS requests.
    Invoke {
        /// Nodes.
        #[arg(long, default_value_t = 20)]
        nodes: usize,
        /// Invocations of the burst.
        #[arg(long, default_value_t = 1000)]
        burst: usize,
        /// Invocations a second before it.
        #[arg(long, default_value_t = 200.0)]
        rate: f64,
    },
    /// Bursts of invocations placed on equal nodes, simulated: no servers are started.
    Placement {
        /// Nodes.
        #[arg(long, default_value_t = 10_000)]
        nodes: usize,
        /// Invocations in each burst.
        #[arg(long, default_value_t = 100_000)]
        burst: usize,
    },
    /// All of the delivery scenarios with their defaults: everything but `rolling`, `observe`, `read`, `push`,
    /// `invoke` and `placement`.
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
