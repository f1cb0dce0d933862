//! `read`: listing, searching and the inbox over many messages, and sequential scans by Postgres.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context, Result};
use sqlx::{Connection, PgConnection};
use tokio::{task::JoinSet, time::Instant};

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::report::{Report, Row};
use crate::stats::Latency;
use crate::target::Target;
use crate::usage::Sample;

/// Number of concurrent readers.
const READERS: usize = 8;
/// Number of channels with messages; each reader agent is a member of all.
const CHANNELS: usize = 50;

const WORDS: [&str; 24] = [
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper", "krypton",
    "lagoon", "meadow", "nimbus", "onyx", "prairie", "quartz", "raven", "sierra", "tundra", "umbra", "violet",
    "willow", "zephyr",
];

/// Posts `messages`, then reads them in three ways.
pub(crate) async fn run(common: &Common, messages: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let authors = workspace.agents("author", CHANNELS).await?;
    for (number, author) in authors.iter().enumerate() {
        workspace.channel(&format!("c{number}"), author, &[]).await?;
    }
    fill(common, &workspace, &authors, messages, report).await?;
    // A reader that is a member of all channels and has read nothing: the worst case of an inbox. It joins late, so
    // that the messages are not delivered to it.
    let reader = workspace.agents("reader", 1).await?.swap_remove(0);
    for number in 0..CHANNELS {
        workspace.join(&format!("c{number}"), &reader).await?;
    }
    let mut database = PgConnection::connect(target.stack().database_url()).await?;
    let kinds: [(&str, fn(usize) -> String); 4] = [
        ("list", |n| format!("/v1/channels/c{}/messages?limit=50", n % CHANNELS)),
        ("search one word", |n| format!("/v1/search?q={}&limit=20", word(n, 0))),
        ("search two words in a channel", |n| {
            format!("/v1/search?q={}%20{}&channel=c{}&limit=20", word(n, 0), word(n, 3), n % CHANNELS)
        }),
        ("inbox", |_| "/v1/inbox?limit=20".to_owned()),
    ];
    for (kind, path) in kinds {
        let scans = scans(&mut database).await?;
        let mut row = read(common, &target, &workspace, &reader, &format!("read {kind}"), path).await?;
        let scanned: Vec<String> = scans_since(&mut database, &scans).await?;
        if !scanned.is_empty() {
            row.problems.push(format!("scanned {}", scanned.join(", ")));
        }
        row.notes.push(format!("{messages} messages in {CHANNELS} channels"));
        report.add(row);
    }
    Ok(())
}

fn word(n: usize, offset: usize) -> &'static str {
    let mixed = (n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    WORDS[(mixed as usize + offset) % WORDS.len()]
}

async fn fill(
    common: &Common,
    workspace: &Workspace,
    authors: &[Agent],
    messages: usize,
    report: &mut Report,
) -> Result<()> {
    let collector = Arc::new(Collector::default());
    let authors: Arc<[Agent]> = authors.into();
    let started = Instant::now();
    let load =
        Load { duration: std::time::Duration::from_secs(3600), ..Load::counted(common.in_flight.into(), messages) };
    let sent = drive(&load, &collector, {
        let workspace = workspace.clone();
        move |number, _| {
            let (workspace, authors) = (workspace.clone(), Arc::clone(&authors));
            async move {
                let channel = number % CHANNELS;
                let text: Vec<&str> = (0..12).map(|nth| word(number * 31 + nth * 7, nth)).collect();
                let body = format!(r#"{{"text":"{} number{number}"}}"#, text.join(" "));
                let pool = workspace.pool(number);
                let token = Some(authors[channel].token.as_str());
                pool.post(&format!("/v1/channels/c{channel}/messages"), token, &body).await?.success()?;
                Ok(())
            }
        }
    })
    .await;
    let mut row =
        Row { run: format!("read: posting {messages}"), seconds: started.elapsed().as_secs_f64(), ..Row::default() };
    row.add_sent(sent);
    row.per_second = Some(row.accepted as f64 / row.seconds);
    report.add(row);
    Ok(())
}

/// Sends one kind of request for the length of a window, after one unmeasured request per reader.
async fn read(
    common: &Common,
    target: &Target,
    workspace: &Workspace,
    reader: &Agent,
    run: &str,
    path: fn(usize) -> String,
) -> Result<Row> {
    let next = Arc::new(AtomicUsize::new(0));
    for number in 0..READERS {
        get(workspace, reader, number, path).await?;
    }
    let roots = target.roots();
    let (before, started) = (Sample::now(&roots), Instant::now());
    let until = started + common.window();
    let mut readers = JoinSet::new();
    for _ in 0..READERS {
        let (workspace, reader, next) = (workspace.clone(), reader.clone(), Arc::clone(&next));
        readers.spawn(async move {
            let mut took = Vec::new();
            while Instant::now() < until {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let asked = Instant::now();
                get(&workspace, &reader, number, path).await?;
                took.push(u32::try_from(asked.elapsed().as_micros()).unwrap_or(u32::MAX));
            }
            anyhow::Ok(took)
        });
    }
    let mut took = Vec::new();
    while let Some(one) = readers.join_next().await {
        took.extend(one.context("a reader panicked")??);
    }
    let seconds = started.elapsed().as_secs_f64();
    let accepted = took.len() as u64;
    Ok(Row {
        run: run.to_owned(),
        accepted,
        seconds,
        per_second: Some(accepted as f64 / seconds),
        answer: Latency::of(took),
        cpu: Sample::now(&roots).since(&before),
        ..Row::default()
    })
}

async fn get(workspace: &Workspace, reader: &Agent, number: usize, path: fn(usize) -> String) -> Result<()> {
    workspace.pool(number).get(&path(number), Some(&reader.token)).await?.success()?;
    Ok(())
}

/// Returns the number of sequential scans of each large table.
async fn scans(database: &mut PgConnection) -> Result<Vec<(String, i64)>> {
    // Flush the statistics now; otherwise backends report them when they idle.
    let rows = sqlx::query_as(
        "SELECT relname::text, seq_scan FROM pg_stat_user_tables
          WHERE relname ~ '^(messages|message_search|deliveries|ack_log|event_log|channel_members|reactions|message_reads)'
            AND n_live_tup > 1000
          ORDER BY relname",
    );
    Ok(rows.fetch_all(database).await?)
}

async fn scans_since(database: &mut PgConnection, before: &[(String, i64)]) -> Result<Vec<String>> {
    // Backends report their counts with a delay of at most a second.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let after = scans(database).await?;
    let grown = after.iter().filter_map(|(table, count)| {
        let earlier = before.iter().find(|(name, _)| name == table).map_or(*count, |(_, count)| *count);
        (*count > earlier).then(|| format!("{table} {} times", count - earlier))
    });
    Ok(grown.collect())
}
