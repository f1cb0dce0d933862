//! Dead letters are sent again, by the workers.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_domain::DeliveryId;
use relay_engine::dead_letters::LetterCount;
use serde_json::json;

use super::Filter;
use crate::output::{Bar, Output};

/// How often to look how far the workers are.
const LOOK_EVERY: Duration = Duration::from_millis(250);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    filter: Filter,
    /// One letter, by its delivery id.
    #[arg(long, conflicts_with_all = ["agent", "node", "reason", "older_than_seconds", "all"])]
    delivery: Option<String>,
    /// Letters a second.
    #[arg(long)]
    rate: Option<i32>,
    /// Do not wait for the workers.
    #[arg(long)]
    no_wait: bool,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    let Arguments { filter, delivery, rate, no_wait } = arguments;
    let desk = filter.desk().await?;
    if let Some(text) = &delivery {
        let id: DeliveryId = text.parse().ok().context("--delivery is no delivery's id")?;
        if filter.dry_run {
            let reason = desk.reason_of(id).await.context("read the letter")?;
            return out.one(&json!({ "delivery_id": id.to_string(), "reason": reason }), |_| format!("{id}: {reason}"));
        }
        let (fresh, seq) = desk.redrive_one(id).await.context("send the letter again")?;
        return out.one(&json!({ "delivery_id": id.to_string(), "sent_as": fresh.to_string(), "seq": seq }), |_| {
            format!("{id} was sent again as {fresh}, seq {seq}")
        });
    }
    let query = filter.query(&desk)?;
    let count = desk.count(&query).await.context("count the letters")?;
    if filter.dry_run {
        return out.one(&shown(&count), |_| lines(&count));
    }
    let begun = desk.redrive_all(&query, rate).await.context("begin the redrive")?;
    let mut now = begun.clone();
    let mut bar = Bar::new("letters", out);
    while !no_wait && now.finished_at.is_none() {
        tokio::time::sleep(LOOK_EVERY).await;
        now = desk.redrive(begun.redrive_id).await.context("look at the redrive")?;
        bar.show((now.redriven + now.refused).unsigned_abs(), now.matched.unsigned_abs());
    }
    bar.end();
    let told = json!({
        "redrive_id": now.redrive_id, "matched": now.matched, "redriven": now.redriven, "refused": now.refused,
        "rate": now.rate, "completed": now.finished_at.is_some(),
    });
    out.one(&told, |_| {
        let state = if now.finished_at.is_some() { "is done" } else { "has begun" };
        let done = format!("redrive {} {state}: {} of {} sent again", now.redrive_id, now.redriven, now.matched);
        format!("{done}, {} could not be, {} a second", now.refused, now.rate)
    })
}

/// A count as JSON.
pub(super) fn shown(count: &LetterCount) -> serde_json::Value {
    let by_reason: serde_json::Map<_, _> =
        count.by_reason.iter().map(|(reason, letters)| (reason.clone(), json!(letters))).collect();
    json!({ "letters": count.total, "by_reason": by_reason })
}

/// A count for people.
pub(super) fn lines(count: &LetterCount) -> String {
    let mut lines: Vec<String> =
        count.by_reason.iter().map(|(reason, letters)| format!("{letters:>10}  {reason}")).collect();
    lines.push(format!("{:>10}  letters", count.total));
    lines.join("\n")
}
