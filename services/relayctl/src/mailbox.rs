//! `relayctl mailbox`: inspects the mailbox of an agent.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use relay_admin::InspectedMailbox;
use relay_domain::mailboxes::delivery::Settlement;

use crate::{
    connection::WorkspaceArgument,
    output::{Output, format_time, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Show an agent's mailbox: its floors, holes, settlements and newest rows.
    Inspect {
        #[command(flatten)]
        workspace: WorkspaceArgument,
        /// Name or id of the agent.
        agent: String,
        /// Number of newest rows to show.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(i64).range(0..=1000))]
        last: i64,
    },
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    let Command::Inspect { workspace, agent, last } = command;
    let (admin, scope) = workspace.find().await?;
    let mailbox = admin.mailbox(scope, &agent, last).await.context("read the mailbox")?;
    out.print_value(&mailbox, format_mailbox)
}

fn format_mailbox(mailbox: &InspectedMailbox) -> String {
    let it = &mailbox.inside;
    let mut text = String::new();
    let connected = if it.connected { "connected" } else { "not connected" };
    // Writing to a string cannot fail.
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
    if !mailbox.settlements.is_empty() {
        let _ = writeln!(text, "\nsettled or parked apart from the floors:");
    }
    for settlement in &mailbox.settlements {
        let state = match settlement.state {
            Settlement::Acked => "acked by REST",
            Settlement::Failed => "failed",
            Settlement::Deferred => "deferred",
            Settlement::DeadLettered => "dead-lettered",
        };
        let why = or_dash(settlement.reason.as_ref().or(settlement.error.as_ref()));
        let _ = writeln!(text, "{:>10}  {state}  {}  {why}", settlement.seq, format_time(settlement.at));
    }
    if !mailbox.frames.is_empty() {
        let _ = writeln!(text, "\nnewest rows:");
    }
    for frame in &mailbox.frames {
        let beginning = or_dash(frame.beginning.as_ref().map(|text| format!("{text:?}")));
        let _ =
            writeln!(text, "{:>10}  {}  {}  {beginning}", frame.seq, format_time(frame.created_at), frame.source_id);
    }
    text.trim_end().to_owned()
}
