//! The command line of the fake agent.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Display of typed text by the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Show {
    /// The kernel echoes lines, and the program reads whole ones.
    Cooked,
    /// The program reads keys and echoes each line itself when it is submitted.
    Raw,
    /// The alternate screen is drawn again with every key: a boxed input line, wrapped, between old messages.
    Screen,
    /// Nothing is shown.
    Mute,
}

/// Way in which the program confirms messages whose reminder asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Confirm {
    /// An ack file.
    File,
    /// The tool `relay_ack` of the broker's MCP server.
    Mcp,
}

/// Plays an agent's command line in a terminal, for tests of the broker.
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    #[arg(value_enum)]
    pub(crate) show: Show,
    /// File for submitted messages.
    #[arg(long)]
    pub(crate) log: PathBuf,
    /// File for all bytes that were typed.
    #[arg(long)]
    pub(crate) keys: Option<PathBuf>,
    /// Bytes of output in a second that have nothing to do with messages; `max` is as fast as the terminal takes them.
    #[arg(long, value_parser = rate, default_value = "0")]
    pub(crate) flood: usize,
    /// Confirms messages.
    #[arg(long, value_enum)]
    pub(crate) confirm: Option<Confirm>,
    /// Ends after so many messages.
    #[arg(long)]
    pub(crate) exit_after: Option<usize>,
    /// Exit code at that end.
    #[arg(long, default_value_t = 0)]
    pub(crate) exit_code: u8,
    /// Ends by this signal instead.
    #[arg(long)]
    pub(crate) exit_signal: Option<i32>,
    /// SIGHUP and SIGTERM do not end it.
    #[arg(long)]
    pub(crate) ignore_signals: bool,
    /// Starts a child that ignores signals too.
    #[arg(long)]
    pub(crate) child: bool,
    /// Starts a process in a session of its own.
    #[arg(long)]
    pub(crate) grandchild: bool,
    /// Milliseconds before the prompt comes and anything is read.
    #[arg(long, default_value_t = 0)]
    pub(crate) start_ms: u64,
    /// Milliseconds between a submitted message and its echo by the program, which reads on meanwhile.
    #[arg(long, default_value_t = 0)]
    pub(crate) echo_ms: u64,
    /// Quotes each message in ways that prove nothing: under other ids, in parts, in the window's title.
    #[arg(long)]
    pub(crate) quote: bool,
    /// Prints the header of the message before, and nothing of its text, when it gets the next one.
    #[arg(long)]
    pub(crate) quote_earlier: bool,
    /// Shows only each so many-th message.
    #[arg(long, default_value_t = 1)]
    pub(crate) show_every: usize,
    /// Shows a long paste as a placeholder.
    #[arg(long)]
    pub(crate) fold: bool,
    /// Writes its own output in pieces of one byte.
    #[arg(long)]
    pub(crate) split: bool,
    /// Asks the terminal for its status, position and attributes, and notes the answers as keys.
    #[arg(long)]
    pub(crate) query: bool,
    /// Arguments for the MCP servers, as a harness gets them.
    #[arg(long)]
    pub(crate) mcp_config: Option<String>,
    /// Arguments of a harness that have no meaning here.
    #[arg(long)]
    pub(crate) session_id: Option<String>,
    /// Like `--session-id`.
    #[arg(long)]
    pub(crate) resume: Option<String>,
    /// Like `--session-id`.
    #[arg(long)]
    pub(crate) model: Option<String>,
}

fn rate(text: &str) -> Result<usize, std::num::ParseIntError> {
    if text == "max" { Ok(usize::MAX) } else { text.parse() }
}
