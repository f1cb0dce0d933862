//! Rows of http_push attempts, written by [`crate::push::record`] in its transaction.
//!
//! Attempt rows are the bulk of what http_push writes. They go in with `COPY`, which needs no array parameters, no WAL
//! record per row, and no executor work per row.

use chrono::{DateTime, Utc};
use relay_domain::push::attempt::{PushAttempt, RecordingPass};

use crate::{StoreError, StoreResult, connections::Transaction};

/// Smallest batch that is copied. `COPY` is parsed at every call and takes one more round trip than an insert.
const MIN_COPY_ROWS: usize = 16;

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
            "SELECT workspace_id, agent_id, seq, attempt_id, (attempted_at AT TIME ZONE 'UTC')::date, node_id,
                    attempted_at, latency_ms, status, answer, error
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::timestamptz[],
                           $7::int[], $8::smallint[], $9::bytea[], $10::text[])
                    AS k (workspace_id, agent_id, seq, attempt_id, node_id, attempted_at,
                          latency_ms, status, answer, error)",
            $rest
        )
    };
}

pub(crate) async fn write_attempts(
    tx: &mut Transaction,
    attempts: &[PushAttempt],
    pass: RecordingPass,
) -> StoreResult<()> {
    // `COPY` has no ON CONFLICT, so rows that may exist are inserted.
    if pass == RecordingPass::Repeated || attempts.len() < MIN_COPY_ROWS {
        insert_rows(tx, attempts, pass).await
    } else {
        copy_rows(tx, attempts).await
    }
}

async fn insert_rows(tx: &mut Transaction, attempts: &[PushAttempt], pass: RecordingPass) -> StoreResult<()> {
    // The conflict check makes the statement a third slower, so the first pass goes without.
    let statement = match pass {
        RecordingPass::First => insert_attempts!(""),
        RecordingPass::Repeated => insert_attempts!(" ON CONFLICT DO NOTHING"),
    };
    sqlx::query(statement)
        .bind(attempts.iter().map(|t| t.mailbox.scope.workspace_id()).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.mailbox.agent_id).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.seq).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.id).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| &t.mailbox.node_id).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.started_at).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.latency_ms).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.status).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.answer.as_deref()).collect::<Vec<_>>())
        .bind(attempts.iter().map(|t| t.http.error.as_deref()).collect::<Vec<_>>())
        .execute(&mut **tx)
        .await
        .map(|_| ())
        .map_err(StoreError::from_sqlx("recording attempts"))
}

async fn copy_rows(tx: &mut Transaction, attempts: &[PushAttempt]) -> StoreResult<()> {
    let doing = "recording attempts";
    let mut copy = tx.copy_in_raw(COPY).await.map_err(StoreError::from_sqlx(doing))?;
    copy.send(encode_rows(attempts)).await.map_err(StoreError::from_sqlx(doing))?;
    copy.finish().await.map(|_| ()).map_err(StoreError::from_sqlx(doing))
}

/// Encodes the attempts in Postgres' binary `COPY` format, in the order of the primary key, so that neighbours in the
/// index are written together.
fn encode_rows(attempts: &[PushAttempt]) -> Vec<u8> {
    let mut sorted: Vec<&PushAttempt> = attempts.iter().collect();
    sorted.sort_unstable_by_key(|t| (t.mailbox.scope, t.mailbox.agent_id, t.seq, t.http.id));
    let mut out = Vec::with_capacity(64 + attempts.len() * 192);
    // Signature, no flags, no header extension.
    out.extend_from_slice(b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0");
    for attempt in sorted {
        let http = &attempt.http;
        out.extend_from_slice(&COLUMNS.to_be_bytes());
        push_field(&mut out, &attempt.mailbox.scope.workspace_id().get().to_be_bytes());
        push_field(&mut out, &attempt.mailbox.agent_id.get().to_be_bytes());
        push_field(&mut out, &attempt.seq.to_be_bytes());
        push_field(&mut out, &http.id.get().to_be_bytes());
        push_field(&mut out, &encode_date(http.started_at).to_be_bytes());
        push_field(&mut out, attempt.mailbox.node_id.as_str().as_bytes());
        push_field(&mut out, &encode_timestamp(http.started_at).to_be_bytes());
        push_field(&mut out, &http.latency_ms.to_be_bytes());
        push_optional(&mut out, http.status.map(i16::to_be_bytes).as_ref().map(<[u8; 2]>::as_slice));
        push_optional(&mut out, http.answer.as_deref());
        push_optional(&mut out, http.error.as_deref().map(str::as_bytes));
    }
    out.extend_from_slice(&(-1_i16).to_be_bytes());
    out
}

fn push_field(out: &mut Vec<u8>, bytes: &[u8]) {
    // The length fits: answers are at most 1 KiB, errors at most 500 characters, ids a few dozen bytes.
    out.extend_from_slice(&i32::try_from(bytes.len()).unwrap_or(i32::MAX).to_be_bytes());
    out.extend_from_slice(bytes);
}

fn push_optional(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => push_field(out, bytes),
        None => out.extend_from_slice(&(-1_i32).to_be_bytes()),
    }
}

/// Days from the Unix epoch to 2000-01-01, from which Postgres counts dates and timestamps.
const POSTGRES_EPOCH_DAYS: i64 = 10_957;
const MICROS_PER_DAY: i64 = 86_400_000_000;

/// Encodes a `date`: days since the epoch.
fn encode_date(at: DateTime<Utc>) -> i32 {
    // Saturates in the year 5 881 580.
    i32::try_from(at.timestamp().div_euclid(86_400) - POSTGRES_EPOCH_DAYS).unwrap_or(i32::MAX)
}

/// Encodes a `timestamptz`: microseconds since the epoch.
fn encode_timestamp(at: DateTime<Utc>) -> i64 {
    at.timestamp_micros() - POSTGRES_EPOCH_DAYS * MICROS_PER_DAY
}
