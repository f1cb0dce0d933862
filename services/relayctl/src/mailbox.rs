//! `relayctl mailbox`.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use relay_engine::admin::InspectedMailbox;

use crate::{
    connection::Workspace,
    output::{Output, or_dash, time},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Show where an agent's mailbox stands: its numbers, holes, what was settled apart, and the newest rows.
    Inspect {
        #[command(flatten)]
        workspace: Workspace,
        /// Name or id of the agent.
        agent: String,
        /// How many of the newest rows.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(i64).range(0..=1000))]
        last: i64,
    },
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    let Command::Inspect { workspace, agent, last } = command;
    let (admin, scope) = workspace.find().await?;
    let mailbox = admin.mailbox(scope, &agent, last).await.context("read the mailbox")?;
    out.one(&mailbox, told)
}

fn told(mailbox: &InspectedMailbox) -> String {
    let it = &mailbox.inside;
    let mut text = String::new();
    let connected = if it.connected { "connected" } else { "not connected" };
    let _ = writeln!(
        text,
        "{} ({}), at {} / {}, {connected}",
        it.name,
        it.agent_id,
        it.node_id,
        or_dash(it.provider.as_ref())
    );
    let _ = writeln!(text, "next seq       {}", it.next_seq);
    let _ = writeln!(text, "sent up to     {}", it.sent_seq);
    let _ = writeln!(text, "acked up to    {}", it.ack_floor);
    let _ = writeln!(text, "settled up to  {}", it.settled_floor);
    let _ = writeln!(text, "waiting        {}", it.next_seq - 1 - it.settled_floor);
    let holes: Vec<String> = it.holes.iter().map(i64::to_string).collect();
    let _ = writeln!(text, "holes          {}", if holes.is_empty() { "none".to_owned() } else { holes.join(", ") });
    if !mailbox.exceptions.is_empty() {
        let _ = writeln!(text, "\nsettled or parked apart from the floors:");
    }
    for exception in &mailbox.exceptions {
        let state = match exception.state {
            1 => "acked by REST",
            2 => "failed",
            3 => "deferred",
            4 => "dead-lettered",
            _ => "unknown",
        };
        let why = or_dash(exception.reason.as_ref().or(exception.error.as_ref()));
        let _ = writeln!(text, "{:>10}  {state}  {}  {why}", exception.seq, time(exception.at));
    }
    if !mailbox.frames.is_empty() {
        let _ = writeln!(text, "\nnewest rows:");
    }
    for frame in &mailbox.frames {
        let beginning = or_dash(frame.beginning.as_ref().map(|text| format!("{text:?}")));
        let _ = writeln!(text, "{:>10}  {}  {}  {beginning}", frame.seq, time(frame.created_at), frame.source_id);
    }
    text.trim_end().to_owned()
}
