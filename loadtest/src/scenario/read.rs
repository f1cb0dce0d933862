//! `read`: listing, searching and the inbox over many messages, and sequential scans by Postgres.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context, Result};
use sqlx::{Connection, PgConnection};
use tokio::{task::JoinSet, time::Instant};

use crate::api::{Agent, Workspace};
use crate::baseline::GatewayProcess;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::report::{Better, Ratio, Report, Row};
use crate::stats::Latency;
use crate::target::Target;
use crate::usage::{Roots, Sample};

/// Number of concurrent readers.
const READERS: usize = 8;
/// Number of channels with messages; each reader agent is a member of all.
const CHANNELS: usize = 50;
/// Bytes around the row of a plain route.
const ENVELOPE: usize = r#"{"ok":true,"data":""}"#.len();

const WORDS: [&str; 24] = [
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper", "krypton",
    "lagoon", "meadow", "nimbus", "onyx", "prairie", "quartz", "raven", "sierra", "tundra", "umbra", "violet",
    "willow", "zephyr",
];

/// Posts `messages`, then reads the reader's agent and messages, each compared with a plain route that answers one row
/// of the same length.
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
    let bare = match common.no_baselines {
        true => None,
        false => Some(GatewayProcess::start(&target).await?),
    };
    let source = Source { workspace, token: Some(reader.token), roots: target.roots() };
    let kinds: [(&str, fn(usize) -> String); 5] = [
        ("agent", |_| "/v1/agent".to_owned()),
        ("list", |n| format!("/v1/channels/c{}/messages?limit=50", n % CHANNELS)),
        ("search one word", |n| format!("/v1/search?q={}&limit=20", word(n, 0))),
        ("search two words in a channel", |n| {
            format!("/v1/search?q={}%20{}&channel=c{}&limit=20", word(n, 0), word(n, 3), n % CHANNELS)
        }),
        ("inbox", |_| "/v1/inbox?limit=20".to_owned()),
    ];
    for (kind, path) in kinds {
        let scans = scans(&mut database).await?;
        let bytes = source.get(0, &path).await?;
        let mut row = read(common, &source, &format!("read {kind}"), path).await?;
        let scanned: Vec<String> = scans_since(&mut database, &scans).await?;
        if !scanned.is_empty() {
            row.problems.push(format!("scanned {}", scanned.join(", ")));
        }
        row.notes.push(format!("{messages} messages in {CHANNELS} channels, {bytes} bytes"));
        let ours = report.add(row);
        let Some(bare) = &bare else { continue };
        let row_of_bytes = move |_: usize| format!("/v1/rows/{}", bytes.saturating_sub(ENVELOPE));
        let plain = Source { workspace: bare.workspace(), token: None, roots: bare.roots()? };
        let theirs = report.add(read(common, &plain, &format!("one row for {kind}"), row_of_bytes).await?);
        report.ratios.push(compare(report, ours, theirs));
    }
    Ok(())
}

/// Compares requests per second with those of a plain route.
fn compare(report: &Report, ours: usize, theirs: usize) -> Ratio {
    let rate = |index: usize| report.rows[index].per_second.unwrap_or(f64::NAN);
    let what =
        format!("{}: {:.0}/s / {}: {:.0}/s", report.rows[ours].run, rate(ours), report.rows[theirs].run, rate(theirs));
    Ratio { target: "read", what, value: rate(ours) / rate(theirs), ship: 0.4, goal: 0.7, better: Better::Higher }
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

/// Server that is read from, and the processes behind it.
#[derive(Clone)]
struct Source {
    workspace: Workspace,
    token: Option<String>,
    roots: Roots,
}

impl Source {
    /// Sends one request and returns the length of its answer.
    async fn get<P: Fn(usize) -> String>(&self, number: usize, path: &P) -> Result<usize> {
        let answer = self.workspace.pool(number).get(&path(number), self.token.as_deref()).await?;
        Ok(answer.success()?.body.len())
    }
}

/// Sends one kind of request for the length of a window, after one unmeasured request per reader.
async fn read<P>(common: &Common, source: &Source, run: &str, path: P) -> Result<Row>
where
    P: Fn(usize) -> String + Clone + Send + Sync + 'static,
{
    let next = Arc::new(AtomicUsize::new(0));
    for number in 0..READERS {
        source.get(number, &path).await?;
    }
    let (before, started) = (Sample::now(&source.roots), Instant::now());
    let until = started + common.window();
    let mut readers = JoinSet::new();
    for _ in 0..READERS {
        let (source, path, next) = (source.clone(), path.clone(), Arc::clone(&next));
        readers.spawn(async move {
            let mut took = Vec::new();
            while Instant::now() < until {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let asked = Instant::now();
                source.get(number, &path).await?;
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
        answer: Latency::from_micros(took),
        cpu: Sample::now(&source.roots).since(&before),
        ..Row::default()
    })
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
