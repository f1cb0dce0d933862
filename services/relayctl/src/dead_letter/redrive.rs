//! `relayctl dead-letter redrive`: requests redrives, which the workers perform.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_domain::DeliveryId;
use relay_engine::mailboxes::dead_letters::DeadLetterCount;
use serde_json::json;

use super::Filter;
use crate::output::{Output, ProgressBar};

/// Interval at which the progress is read.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    filter: Filter,
    /// One dead letter, by its delivery id.
    #[arg(long, conflicts_with_all = ["agent", "node", "reason", "older_than_seconds", "all"])]
    delivery: Option<String>,
    /// Redrives per second.
    #[arg(long)]
    rate: Option<i32>,
    /// Do not wait for the workers.
    #[arg(long)]
    no_wait: bool,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    let Arguments { filter, delivery, rate, no_wait } = arguments;
    let admin = filter.admin().await?;
    if let Some(text) = &delivery {
        let id: DeliveryId = text.parse().ok().context("--delivery is no delivery's id")?;
        if filter.dry_run {
            let reason = admin.dead_letter_reason(id).await.context("read the dead letter")?.as_str();
            return out.print_value(&json!({ "delivery_id": id.to_string(), "reason": reason }), |_| {
                format!("{id}: {reason}")
            });
        }
        let (fresh, seq) = admin.redrive_one(id).await.context("redrive the dead letter")?;
        return out
            .print_value(&json!({ "delivery_id": id.to_string(), "sent_as": fresh.to_string(), "seq": seq }), |_| {
                format!("{id} was sent again as {fresh}, seq {seq}")
            });
    }
    let query = filter.query(&admin)?;
    let count = admin.count_redrivable(&query).await.context("count the dead letters")?;
    if filter.dry_run {
        return out.print_value(&count_to_json(&count), |_| format_count(&count));
    }
    let begun = admin.redrive_all(&query, rate).await.context("begin the redrive")?;
    let mut now = begun.clone();
    let mut bar = ProgressBar::new("dead letters", out);
    // Only shows the progress: the workers go on if the command is interrupted.
    while !no_wait && now.finished_at.is_none() {
        tokio::time::sleep(POLL_INTERVAL).await;
        now = admin.redrive(begun.redrive_id).await.context("look at the redrive")?;
        bar.update((now.redriven + now.refused).unsigned_abs(), now.matched.unsigned_abs());
    }
    bar.finish();
    let report = json!({
        "redrive_id": now.redrive_id.get(), "matched": now.matched, "redriven": now.redriven, "refused": now.refused,
        "rate": now.rate, "completed": now.finished_at.is_some(),
    });
    out.print_value(&report, |_| {
        let state = if now.finished_at.is_some() { "is done" } else { "has begun" };
        let done = format!("redrive {} {state}: {} of {} sent again", now.redrive_id, now.redriven, now.matched);
        format!("{done}, {} could not be, {} a second", now.refused, now.rate)
    })
}

pub(super) fn count_to_json(count: &DeadLetterCount) -> serde_json::Value {
    let by_reason: serde_json::Map<_, _> =
        count.by_reason.iter().map(|(reason, count)| (reason.as_str().to_owned(), json!(count))).collect();
    json!({ "letters": count.total, "by_reason": by_reason })
}

pub(super) fn format_count(count: &DeadLetterCount) -> String {
    let mut lines: Vec<String> =
        count.by_reason.iter().map(|(reason, count)| format!("{count:>10}  {}", reason.as_str())).collect();
    lines.push(format!("{:>10}  dead letters", count.total));
    lines.join("\n")
}
