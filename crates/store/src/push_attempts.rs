//! The rows of tries: one for each, many at once.
//!
//! They are the most that pushing writes, so they go in by `COPY`, which spares Postgres the arrays, a record in the log
//! for each row, and what its executor does to each. Called by [`crate::push_record`], in its transaction.

use chrono::{DateTime, NaiveDate, TimeZone as _, Utc};
use sqlx::PgTransaction;

use crate::{StoreError, StoreResult, push_record::Tried};

/// Fewer tries are inserted: `COPY` is read anew each time and takes one round trip more.
const COPIED_FROM: usize = 16;

macro_rules! attempt_columns {
    () => {
        "(workspace_id, agent_id, seq, attempt_id, created_on, node_id, attempted_at, latency_ms, status, answer, error)"
    };
}

const COLUMNS: i16 = 11;
const COPY: &str = concat!("COPY delivery_attempts ", attempt_columns!(), " FROM STDIN (FORMAT binary)");

macro_rules! insert_attempts {
    ($rest:literal) => {
        concat!(
            "INSERT INTO delivery_attempts ",
            attempt_columns!(),
            "SELECT w, a, s, i, (t AT TIME ZONE 'UTC')::date, n, t, l, c, b, e
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::timestamptz[],
                           $7::int[], $8::smallint[], $9::bytea[], $10::text[]) AS k (w, a, s, i, n, t, l, c, b, e)",
            $rest
        )
    };
}

/// Writes the tries. With `again`, some may be there already.
pub(crate) async fn write(tx: &mut PgTransaction<'_>, tries: &[Tried], again: bool) -> StoreResult<()> {
    if again || tries.len() < COPIED_FROM { insert(tx, tries, again).await } else { copy(tx, tries).await }
}

async fn insert(tx: &mut PgTransaction<'_>, tries: &[Tried], again: bool) -> StoreResult<()> {
    // Looking for what is there already costs a third more, and is of use after a failure only.
    sqlx::query(if again { insert_attempts!(" ON CONFLICT DO NOTHING") } else { insert_attempts!("") })
        .bind(tries.iter().map(|t| t.mailbox.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.mailbox.agent_id.get()).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.seq).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.id).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.mailbox.node_id.as_str()).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.at).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.latency_ms).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.status).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.answer.as_deref()).collect::<Vec<_>>())
        .bind(tries.iter().map(|t| t.attempt.error.as_deref()).collect::<Vec<_>>())
        .execute(&mut **tx)
        .await
        .map(|_| ())
        .map_err(StoreError::from_sqlx("recording tries"))
}

async fn copy(tx: &mut PgTransaction<'_>, tries: &[Tried]) -> StoreResult<()> {
    let doing = "recording tries";
    let mut copy = tx.copy_in_raw(COPY).await.map_err(StoreError::from_sqlx(doing))?;
    copy.send(rows(tries)).await.map_err(StoreError::from_sqlx(doing))?;
    copy.finish().await.map(|_| ()).map_err(StoreError::from_sqlx(doing))
}

/// The tries in Postgres' binary format, in the order of the primary key: neighbours in the index are written one
/// after the other.
fn rows(tries: &[Tried]) -> Vec<u8> {
    let mut sorted: Vec<&Tried> = tries.iter().collect();
    sorted.sort_unstable_by_key(|t| {
        (t.mailbox.scope.workspace_id().get(), t.mailbox.agent_id.get(), t.seq, t.attempt.id)
    });
    let mut out = Vec::with_capacity(64 + tries.len() * 192);
    // The signature, no flags, no extension.
    out.extend_from_slice(b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0");
    for tried in sorted {
        let attempt = &tried.attempt;
        out.extend_from_slice(&COLUMNS.to_be_bytes());
        field(&mut out, &tried.mailbox.scope.workspace_id().get().to_be_bytes());
        field(&mut out, &tried.mailbox.agent_id.get().to_be_bytes());
        field(&mut out, &tried.seq.to_be_bytes());
        field(&mut out, &attempt.id.to_be_bytes());
        field(&mut out, &days(attempt.at).to_be_bytes());
        field(&mut out, tried.mailbox.node_id.as_str().as_bytes());
        field(&mut out, &micros(attempt.at).to_be_bytes());
        field(&mut out, &attempt.latency_ms.to_be_bytes());
        optional(&mut out, attempt.status.map(i16::to_be_bytes).as_ref().map(<[u8; 2]>::as_slice));
        optional(&mut out, attempt.answer.as_deref());
        optional(&mut out, attempt.error.as_deref().map(str::as_bytes));
    }
    out.extend_from_slice(&(-1_i16).to_be_bytes());
    out
}

fn field(out: &mut Vec<u8>, bytes: &[u8]) {
    // An answer is 1 KiB at most, an error 500 characters, an id a few dozen bytes.
    out.extend_from_slice(&i32::try_from(bytes.len()).unwrap_or(i32::MAX).to_be_bytes());
    out.extend_from_slice(bytes);
}

fn optional(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => field(out, bytes),
        None => out.extend_from_slice(&(-1_i32).to_be_bytes()),
    }
}

/// Postgres counts from here.
fn epoch() -> NaiveDate {
    NaiveDate::from_ymd_opt(2000, 1, 1).unwrap_or_default()
}

/// A `date`: whole days.
fn days(at: DateTime<Utc>) -> i32 {
    i32::try_from((at.date_naive() - epoch()).num_days()).unwrap_or(i32::MAX)
}

/// A `timestamptz`: microseconds.
fn micros(at: DateTime<Utc>) -> i64 {
    let epoch = Utc.from_utc_datetime(&epoch().and_time(chrono::NaiveTime::MIN));
    (at - epoch).num_microseconds().unwrap_or(i64::MAX)
}
