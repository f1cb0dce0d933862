//! Single deliveries settled or parked by REST, beside what the floors of a mailbox say.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, DeliveryId, MessageId, WorkspaceScope,
    dead_letter::DeadReason,
    delivery::{Exception, Request, SourceKind, extend_floor, on_request, state_of},
};
use sqlx::{PgTransaction, Row as _};

use crate::{
    Store, StoreError, StoreResult, claims,
    delivered::Place,
    events::{self, NewEvent, Recorded},
    expiry::DeadLettered,
    push_mailboxes, reads,
    retries::{self, Sequel},
};

/// What a recipient says about one of its deliveries.
#[derive(Debug, Clone)]
pub enum DeliveryReport {
    /// Done with it.
    Ack,
    /// Could not handle it.
    Fail {
        /// Why.
        error: Option<String>,
        /// Whether trying again could help. If so, the delivery comes back after a pause to an agent that is pushed
        /// to or claims, and as a new delivery to all others: their nodes have a socket, or can have one, and
        /// brokers remember ids. If not, it is a dead letter. Without a word on it, it is recorded only.
        retryable: Option<bool>,
    },
    /// Wants it later.
    Defer {
        /// When.
        available_at: DateTime<Utc>,
        /// Why.
        reason: Option<String>,
    },
}

impl DeliveryReport {
    const fn request(&self) -> Request {
        match self {
            Self::Ack => Request::Ack,
            Self::Fail { .. } => Request::Fail,
            Self::Defer { .. } => Request::Defer,
        }
    }
}

/// What a report has changed.
#[derive(Debug)]
pub struct Reported {
    /// Where the message was posted; `None` for other sources.
    pub place: Option<Place>,
    /// When the message was read, if this report was the first to say so.
    pub first_read_at: Option<DateTime<Utc>>,
    /// When the delivery comes back that was reported as failed for a while.
    pub back_at: Option<DateTime<Utc>>,
    /// The delivery that has taken its place, and its place in the mailbox.
    pub redriven_as: Option<(DeliveryId, i64)>,
    /// The dead letter that it is now.
    pub dead: Option<DeadLettered>,
}

/// How many settled rows are read at a time while the floor is extended.
const FLOOR_PAGE: i64 = 256;

impl Store {
    /// Applies a recipient's report to its delivery: an exception row, the settled floor, and for an
    /// ack the read. All in one transaction that holds the mailbox's cursor row, and that records what
    /// `events` makes of a change.
    ///
    /// The inner `None` when the row stayed as it was, the outer when there is no such delivery.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn report_delivery(
        &self,
        scope: WorkspaceScope,
        delivery: DeliveryId,
        report: &DeliveryReport,
        at: DateTime<Utc>,
        events: impl FnOnce(&Reported) -> Vec<NewEvent> + Send,
    ) -> StoreResult<Option<Option<Recorded>>> {
        let doing = "settling a delivery";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let reported = match apply(&mut tx, scope, delivery, report, at).await? {
            None => return Ok(None),
            Some(None) => return Ok(Some(None)),
            Some(Some(reported)) => reported,
        };
        let recorded = events::append(&mut tx, scope, at, events(&reported)).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(Some(recorded)))
    }
}

/// [`Store::report_delivery`] within a transaction that has locked nothing but, at most, this cursor, and
/// without its events. Whether the row has changed; `None` when there is no such delivery.
pub(crate) async fn report_in(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    report: &DeliveryReport,
) -> StoreResult<Option<bool>> {
    Ok(apply(tx, scope, delivery, report, Utc::now()).await?.map(|reported| reported.is_some()))
}

async fn apply(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    report: &DeliveryReport,
    at: DateTime<Utc>,
) -> StoreResult<Option<Option<Reported>>> {
    let doing = "settling a delivery";
    let (workspace, agent) = (scope.workspace_id().get(), delivery.agent.get());
    let row = sqlx::query(
        "SELECT d.seq, d.source_kind, c.channel_id, c.name AS channel_name, c.conversation_id
           FROM deliveries d
           LEFT JOIN channels c ON c.workspace_id = d.workspace_id AND c.channel_id = d.channel_id
          WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.agent_id = $3 AND d.redrive_no = $4
          ORDER BY d.created_on DESC LIMIT 1",
    )
    .bind(workspace)
    .bind(delivery.source)
    .bind(agent)
    .bind(delivery.redrive_no)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let Some(row) = row else { return Ok(None) };
    let (seq, source_kind): (i64, i16) = (row.get(0), row.get(1));

    let retry = match report {
        DeliveryReport::Fail { retryable: Some(true), .. } => retries::begin(tx, scope, delivery.agent).await?,
        _ => None,
    };
    let cursor = lock_cursor(tx, scope, delivery.agent).await?;
    let current: Option<i16> = sqlx::query_scalar(
        "SELECT state FROM delivery_exceptions WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3",
    )
    .bind(workspace)
    .bind(agent)
    .bind(seq)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let current = current.and_then(|code| Exception::from_code(code).ok());
    let state = state_of(seq, cursor.sent_seq, cursor.ack_floor, current);
    let Some(new) = on_request(state, seq <= cursor.settled_floor, report.request()) else {
        return Ok(Some(None));
    };
    let claim_count = claims::end_lease(tx, scope, delivery.agent, seq).await?;
    let sequel = match (report, retry) {
        (DeliveryReport::Fail { retryable: Some(false), .. }, _) => Sequel::Dead(DeadReason::Rejected),
        (_, Some(retry)) => retries::sequel(tx, scope, delivery, seq, &retry, claim_count, at).await?,
        _ => Sequel::None,
    };
    let (new, back, redriven_seq, dead) = match sequel {
        Sequel::None => (new, None, None, None),
        Sequel::Back { at, retry_no } => (Exception::Deferred, Some((at, retry_no)), None, None),
        Sequel::Redriven { seq } => (new, None, Some(seq), None),
        Sequel::Dead(reason) => (Exception::DeadLettered, None, None, Some(reason)),
    };

    let (error, mut retryable, mut reason, available_at) = match report {
        DeliveryReport::Ack => (None, None, None, None),
        DeliveryReport::Fail { error, retryable } => {
            (error.as_deref(), *retryable, None, back.map(|(available_at, _)| available_at))
        }
        DeliveryReport::Defer { available_at, reason } => (None, None, reason.as_deref(), Some(*available_at)),
    };
    if let Some(dead) = dead {
        (retryable, reason) = (Some(false), Some(dead.as_str()));
    }
    // The cursor row is locked and every writer of exceptions locks it first, so the expected state
    // cannot have moved; the WHERE says it once more. An equal defer changes nothing.
    let written = sqlx::query(
        "INSERT INTO delivery_exceptions AS x
                (workspace_id, agent_id, seq, state, error, retryable, reason, available_at, at, retry_no,
                 redriven_seq, redriven_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, now(), $10, $11, CASE WHEN $11::bigint IS NOT NULL THEN now() END)
         ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
            SET state = excluded.state, error = excluded.error, retryable = excluded.retryable,
                reason = excluded.reason, available_at = excluded.available_at, at = excluded.at,
                retry_no = excluded.retry_no, redriven_seq = coalesce(x.redriven_seq, excluded.redriven_seq),
                redriven_at = coalesce(x.redriven_at, excluded.redriven_at)
          WHERE x.state IS NOT DISTINCT FROM $9
            AND (x.state, x.reason, x.available_at)
                IS DISTINCT FROM (excluded.state, excluded.reason, excluded.available_at)",
    )
    .bind(workspace)
    .bind(agent)
    .bind(seq)
    .bind(new.code())
    .bind(error)
    .bind(retryable)
    .bind(reason)
    .bind(available_at)
    .bind(current.map(Exception::code))
    .bind(back.map_or(0, |(_, retry_no)| retry_no))
    .bind(redriven_seq)
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?
    .rows_affected();
    if written == 0 {
        return Ok(Some(None));
    }

    if let Some(available_at) = available_at {
        push_mailboxes::due_at(tx, scope, delivery.agent, available_at).await?;
    }
    if new.is_settled() {
        settle_contiguous(tx, scope, delivery.agent, cursor.settled_floor).await?;
        push_mailboxes::unblock(tx, scope, delivery.agent).await?;
    }
    let mut first_read_at = None;
    if new == Exception::Acked && source_kind == SourceKind::Message.code() {
        let (read_at, first) = reads::record(tx, scope, MessageId::new(delivery.source), delivery.agent).await?;
        first_read_at = first.then_some(read_at);
    }
    let place = Place::from_row(&row);
    let dead = match dead {
        Some(reason) => Some(retries::letter(tx, scope, delivery, seq, reason, error, place.clone()).await?),
        None => None,
    };
    let back_at = back.map(|(at, _)| at);
    let redriven_as = redriven_seq.map(|seq| (DeliveryId { redrive_no: delivery.redrive_no + 1, ..delivery }, seq));
    Ok(Some(Some(Reported { place, first_read_at, back_at, redriven_as, dead })))
}

/// The position of a mailbox, its row locked until the transaction ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockedCursor {
    /// Highest seq known to have been written to a socket.
    pub(crate) sent_seq: i64,
    /// Acknowledged over a socket up to here.
    pub(crate) ack_floor: i64,
    /// Settled by whatever means up to here.
    pub(crate) settled_floor: i64,
}

/// Locks a mailbox's cursor row, made first if there is none.
pub(crate) async fn lock_cursor(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
) -> StoreResult<LockedCursor> {
    let doing = "locking a mailbox cursor";
    let select = "SELECT sent_seq, ack_floor, settled_floor FROM mailbox_cursors
                   WHERE workspace_id = $1 AND agent_id = $2 FOR UPDATE";
    let read = |row: sqlx::postgres::PgRow| LockedCursor {
        sent_seq: row.get(0),
        ack_floor: row.get(1),
        settled_floor: row.get(2),
    };
    let (workspace, agent) = (scope.workspace_id().get(), agent.get());
    let found = sqlx::query(select)
        .bind(workspace)
        .bind(agent)
        .fetch_optional(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    if let Some(row) = found {
        return Ok(read(row));
    }
    sqlx::query("INSERT INTO mailbox_cursors (workspace_id, agent_id) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(workspace)
        .bind(agent)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    sqlx::query(select)
        .bind(workspace)
        .bind(agent)
        .fetch_one(&mut **tx)
        .await
        .map(read)
        .map_err(StoreError::from_sqlx(doing))
}

/// Moves the settled floor over what is settled apart right above it. The caller holds
/// the cursor row. Returns where the floor stands now.
pub(crate) async fn settle_contiguous(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
    from: i64,
) -> StoreResult<i64> {
    let doing = "extending a settled floor";
    let (workspace, agent) = (scope.workspace_id().get(), agent.get());
    let mut floor = from;
    loop {
        let page: Vec<(i64, i64)> = sqlx::query_as(
            // Acked, failed and dead-lettered rows are settled, and skipped runs; deferred rows are not.
            "SELECT first_seq, last_seq
               FROM ((SELECT seq AS first_seq, seq AS last_seq FROM delivery_exceptions
                       WHERE workspace_id = $1 AND agent_id = $2 AND seq > $3 AND state <> 3
                       ORDER BY seq LIMIT $4)
                     UNION ALL
                     SELECT first_seq, last_seq FROM skipped_seqs
                      WHERE workspace_id = $1 AND agent_id = $2 AND last_seq > $3) AS apart
              ORDER BY first_seq LIMIT $4",
        )
        .bind(workspace)
        .bind(agent)
        .bind(floor)
        .bind(FLOOR_PAGE)
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let reached = extend_floor(floor, page.iter().flat_map(|&(first, last)| first..=last));
        let whole_page = page.last().is_some_and(|run| run.1 == reached) && page.len() as i64 == FLOOR_PAGE;
        floor = reached;
        if !whole_page {
            break;
        }
    }
    if floor > from {
        sqlx::query(
            "UPDATE mailbox_cursors SET settled_floor = $3
              WHERE workspace_id = $1 AND agent_id = $2 AND settled_floor < $3",
        )
        .bind(workspace)
        .bind(agent)
        .bind(floor)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    }
    Ok(floor)
}
