//! `relayctl restore`: recovers a restored database manually.

use anyhow::{Context as _, Result};
use relay_admin::RestoreReport;
use relay_engine::{
    access::secrets::KeyList,
    recovery::{DEFAULT_MARGIN, Margin},
    settings::NatsConfig,
};

use crate::{
    connection::Database,
    output::{Output, ProgressBar, format_time},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    nats: NatsConfig,
    /// As for gateways: without the installation's keys, no message of the log can be verified, and none is recovered.
    #[arg(long, env = "RELAY_SECRET_KEYS", default_value = "", hide_env_values = true)]
    secret_keys: KeyList,
    /// Only show what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Added to numbers that cannot be determined.
    #[arg(long, env = "RELAY_RESTORE_MARGIN", default_value_t = DEFAULT_MARGIN, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    margin: i64,
    /// Add the margin to all numbers, even where the log seems to contain them: NATS was unavailable before Postgres
    /// was lost.
    #[arg(long)]
    jump: bool,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    let admin = arguments.database.connect()?;
    // NATS is required: an operator can start it first, and without the log no delivery could be recovered.
    let margin = Margin { numbers: arguments.margin, always: arguments.jump, without_log: false };
    let mut bar = ProgressBar::new("frames", out);
    let report = admin
        .restore(
            &arguments.nats.servers(),
            &arguments.secret_keys,
            (!arguments.dry_run).then_some(margin),
            |progress| {
                bar.update(progress.looked_at, progress.of);
            },
        )
        .await
        .context("recover the database")?;
    bar.finish();
    out.print_value(&report, format_report)
}

fn format_report(report: &RestoreReport) -> String {
    let found = &report.found;
    let yes = |is: bool| if is { "yes" } else { "no" };
    let mut lines = vec![
        format!("another database than the engine knew  {}", yes(found.database_is_another)),
        format!("the log is ahead of it                 {}", yes(found.log_is_ahead)),
        format!("last seen                              {}", format_time(found.restored_to)),
        format!("the log reaches back to then           {}", yes(found.log_reaches_back)),
        format!("frames to look at                      {}", found.frames),
    ];
    match &report.done {
        None => lines.push("nothing was changed".to_owned()),
        Some(done) => {
            lines.push(format!("{:>10} deliveries written again", done.recovered));
            lines.push(format!("{:>10} deliveries lost: dead letters, reason lost_in_restore", done.lost));
            lines.push(format!("{:>10} mailboxes raised above what the log showed", done.raised));
            lines.push(format!("{:>10} mailboxes raised by {}", done.jumped, done.margin));
        }
    }
    lines.join("\n")
}
