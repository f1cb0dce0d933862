//! Baseline `pg`: multi-row insert transactions on the run's own Postgres, fsync on.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_testkit::servers::Postgres;
use sqlx::{Connection, PgConnection};

use crate::collector::Collector;
use crate::payload::{now_micros, push_text};
use crate::report::Row;
use crate::usage::Roots;
use crate::window::Window;

const ROWS: usize = 100;
const CONNECTIONS: usize = 2;

/// Commits 100 rows of `size` bytes at a time on two connections for `duration`; measures the latency of commits.
pub(crate) async fn rows(postgres: &Postgres, size: usize, duration: Duration) -> Result<Row> {
    let url = postgres.create_database("loadtest_baseline").await?;
    let mut connection = PgConnection::connect(&url).await?;
    let fsync: String = sqlx::query_scalar("show fsync").fetch_one(&mut connection).await?;
    let synchronous: String = sqlx::query_scalar("show synchronous_commit").fetch_one(&mut connection).await?;
    ensure!(fsync == "on" && synchronous == "on", "fsync is {fsync}, synchronous_commit is {synchronous}");
    sqlx::raw_sql(
        "drop table if exists rows;
         create table rows (agent bigint not null, seq bigint not null, body text not null, primary key (agent, seq))",
    )
    .execute(&mut connection)
    .await
    .context("create the table")?;

    let roots = Roots::from([("postgres".to_owned(), postgres.pid())]);
    let collector = Arc::new(Collector::default());
    let window = Window::open(&roots, &collector);
    let ends = tokio::time::Instant::now() + duration;
    let writers: Vec<_> = (0..CONNECTIONS)
        .map(|writer| tokio::spawn(write(url.clone(), Arc::clone(&collector), writer, size, ends)))
        .collect();
    for writer in writers {
        writer.await??;
    }
    let mut row = window.close("pg");
    row.accepted = row.delivered;
    row.notes = vec![format!("{ROWS} rows of {size} B a transaction, {CONNECTIONS} connections; latency of a commit")];
    connection.close().await?;
    Ok(row)
}

async fn write(
    url: String,
    collector: Arc<Collector>,
    writer: usize,
    size: usize,
    ends: tokio::time::Instant,
) -> Result<()> {
    let mut connection = PgConnection::connect(&url).await?;
    let mut body = String::new();
    push_text(&mut body, 0, size);
    let bodies = vec![body; ROWS];
    let agents: Vec<i64> = (0..ROWS).map(|row| (row * CONNECTIONS + writer) as i64).collect();
    for seq in 1_i64.. {
        if tokio::time::Instant::now() >= ends {
            break;
        }
        let began_at = now_micros();
        sqlx::query("insert into rows select agent, $2, body from unnest($1::bigint[], $3::text[]) as r (agent, body)")
            .bind(&agents)
            .bind(seq)
            .bind(&bodies)
            .execute(&mut connection)
            .await?;
        for _ in 0..ROWS {
            collector.delivered(Some(began_at));
        }
    }
    connection.close().await?;
    Ok(())
}
