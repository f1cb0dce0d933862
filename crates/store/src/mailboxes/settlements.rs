//! Settlement of single deliveries over REST: ack, fail and defer, apart from the floors of the mailbox.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    mailboxes::{
        DeliveryReport, MessageLocation,
        dead_letter::DeadLetterReason,
        delivery::{Settlement, SourceKind, apply_request, derive_state, extend_floor},
        stream::Seq,
    },
};

use crate::{
    Store, StoreError, StoreResult,
    codes::DEFERRED,
    connections::Transaction,
    decode::decode_row,
    events::{self, Event, RecordedEvents},
    mailboxes::{
        claims,
        delivery_events::message_location,
        expiry::DeadLetteredDelivery,
        locked_cursor::lock_cursor,
        retries::{self, FailedDelivery, FailureOutcome},
    },
    messages::reads::record_read,
    push::mailboxes,
};

/// Change made by a report.
#[derive(Debug)]
pub struct ReportOutcome {
    /// Channel of the message; `None` for other sources.
    pub place: Option<MessageLocation>,
    /// Read time of the message, if this report is its first read.
    pub first_read_at: Option<DateTime<Utc>>,
    /// End of the pause before a retry in place.
    pub back_at: Option<DateTime<Utc>>,
    /// Id and seq of the delivery that replaces this one.
    pub redriven_as: Option<(DeliveryId, Seq)>,
    /// Set if the delivery became a dead letter.
    pub dead_lettered: Option<DeadLetteredDelivery>,
}

/// Settled rows per read while the floor is extended.
const FLOOR_PAGE: i64 = 256;

impl Store {
    /// Applies a recipient's report to its delivery: writes the settlement, extends the settled floor, and records the
    /// read of an ack. One transaction holds the mailbox's cursor row and also records the events that `events` builds.
    ///
    /// Returns the outer `None` if there is no such delivery, the inner one if the report changed nothing.
    pub async fn report_delivery(
        &self,
        scope: WorkspaceScope,
        delivery: DeliveryId,
        report: &DeliveryReport,
        at: DateTime<Utc>,
        events: impl FnOnce(&ReportOutcome) -> Vec<Event> + Send,
    ) -> StoreResult<Option<Option<RecordedEvents>>> {
        let doing = "settling a delivery";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let reported = match apply_report(&mut tx, scope, delivery, report, at).await? {
            None => return Ok(None),
            Some(None) => return Ok(Some(None)),
            Some(Some(reported)) => reported,
        };
        let recorded = events::append(&mut tx, scope, at, events(&reported)).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(Some(recorded)))
    }
}

/// Performs [`Store::report_delivery`] without events, within a transaction that holds no lock except, at most, this
/// cursor. Returns true if the row changed; `None` if there is no such delivery.
pub(crate) async fn report_within(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    report: &DeliveryReport,
    at: DateTime<Utc>,
) -> StoreResult<Option<bool>> {
    Ok(apply_report(tx, scope, delivery, report, at).await?.map(|reported| reported.is_some()))
}

async fn apply_report(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    delivery: DeliveryId,
    report: &DeliveryReport,
    at: DateTime<Utc>,
) -> StoreResult<Option<Option<ReportOutcome>>> {
    // Before the locks: a delivery row does not change after it was written.
    let Some(ReportedDelivery { seq, source_kind, place }) = find_delivery(tx, scope, delivery).await? else {
        return Ok(None);
    };
    let retry = match report {
        DeliveryReport::Fail { retryable: Some(true), .. } => {
            retries::lock_retry_mode(tx, scope, delivery.agent).await?
        }
        DeliveryReport::Ack | DeliveryReport::Fail { .. } | DeliveryReport::Defer { .. } => None,
    };
    let cursor = lock_cursor(tx, scope, delivery.agent).await?;
    let current = find_settlement(tx, scope, delivery.agent, seq).await?;
    // The settlement of a retryable failure stays until the delivery is handed over again. Until then another failure
    // is a report of the same attempt, and the first one counts.
    let is_requeued = current == Some((Settlement::Deferred, Some(true)));
    if is_requeued && matches!(report, DeliveryReport::Fail { .. }) {
        return Ok(Some(None));
    }
    let current = current.map(|(settlement, _)| settlement);
    let state = derive_state(seq, cursor.sent_seq, cursor.ack_floor, current);
    let Some(new) = apply_request(state, seq <= cursor.settled_floor, report.request()) else {
        return Ok(Some(None));
    };
    let claim_count = claims::end_lease(tx, scope, delivery.agent, seq).await?;
    let failed = FailedDelivery { scope, delivery, seq };
    let outcome = match (report, retry) {
        (DeliveryReport::Fail { retryable: Some(false), .. }, _) => {
            FailureOutcome::DeadLetter(DeadLetterReason::Rejected)
        }
        (_, Some(retry)) => retries::decide_failure_outcome(tx, failed, &retry, claim_count, at).await?,
        _ => FailureOutcome::None,
    };
    let written = NewSettlement::of_report(scope, delivery.agent, seq, new, report, &outcome);
    // Without a change `report_delivery` gives its transaction up, and with it a redrive that was written above.
    if !written.replace(tx, current).await? {
        return Ok(Some(None));
    }

    if let Some(available_at) = written.available_at {
        mailboxes::set_due(tx, scope, delivery.agent, available_at).await?;
    }
    if written.state.is_settled() {
        settle_contiguous(tx, scope, delivery.agent, cursor.settled_floor).await?;
        mailboxes::unblock_mailbox(tx, scope, delivery.agent).await?;
    }
    let mut first_read_at = None;
    if written.state == Settlement::Acked && source_kind == SourceKind::Message {
        let (read_at, first) = record_read(tx, scope, delivery.source.message_id(), delivery.agent).await?;
        first_read_at = first.then_some(read_at);
    }
    let dead_lettered = match outcome {
        FailureOutcome::DeadLetter(reason) => {
            Some(retries::read_dead_letter(tx, failed, reason, written.error, place.clone()).await?)
        }
        FailureOutcome::None | FailureOutcome::Retry { .. } | FailureOutcome::Redriven { .. } => None,
    };
    let back_at = match outcome {
        FailureOutcome::Retry { at, .. } => Some(at),
        FailureOutcome::None | FailureOutcome::Redriven { .. } | FailureOutcome::DeadLetter(_) => None,
    };
    let successor = DeliveryId { redrive_no: delivery.redrive_no + 1, ..delivery };
    let redriven_as = written.redriven_seq.map(|seq| (successor, seq));
    Ok(Some(Some(ReportOutcome { place, first_read_at, back_at, redriven_as, dead_lettered })))
}

/// Delivery that a report is about.
struct ReportedDelivery {
    seq: Seq,
    source_kind: SourceKind,
    place: Option<MessageLocation>,
}

async fn find_delivery(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    delivery: DeliveryId,
) -> StoreResult<Option<ReportedDelivery>> {
    let doing = "finding a reported delivery";
    let row = sqlx::query(
        "SELECT d.seq, d.source_kind, c.channel_id, c.name AS channel_name, c.conversation_id
           FROM deliveries d
           LEFT JOIN channels c ON c.workspace_id = d.workspace_id AND c.channel_id = d.channel_id
          WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.agent_id = $3 AND d.redrive_no = $4
          ORDER BY d.created_on DESC LIMIT 1",
    )
    .bind(scope.workspace_id())
    .bind(delivery.source)
    .bind(delivery.agent)
    .bind(delivery.redrive_no)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let Some(row) = row else { return Ok(None) };
    let (seq, source_kind) = decode_row("deliveries", &row)?;
    let place = message_location(&row).map_err(StoreError::from_sqlx(doing))?;
    Ok(Some(ReportedDelivery { seq, source_kind, place }))
}

/// Returns the settlement of a row, and whether it is that of a retryable failure.
async fn find_settlement(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
    seq: Seq,
) -> StoreResult<Option<(Settlement, Option<bool>)>> {
    let row = sqlx::query(
        "SELECT state, retryable, agent_id, seq FROM delivery_exceptions
          WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(seq)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("finding a settlement"))?;
    row.map(|row| decode_row("delivery_exceptions", &row)).transpose()
}

/// Settlement that a report causes.
struct NewSettlement<'a> {
    scope: WorkspaceScope,
    agent: AgentId,
    seq: Seq,
    state: Settlement,
    error: Option<&'a str>,
    retryable: Option<bool>,
    reason: Option<&'a str>,
    available_at: Option<DateTime<Utc>>,
    retry_no: i16,
    redriven_seq: Option<Seq>,
}

impl<'a> NewSettlement<'a> {
    /// Creates the settlement in the state that the report asks for, unless the outcome of a failure is another one.
    fn of_report(
        scope: WorkspaceScope,
        agent: AgentId,
        seq: Seq,
        asked: Settlement,
        report: &'a DeliveryReport,
        outcome: &FailureOutcome,
    ) -> Self {
        let (error, retryable, reason, available_at) = match report {
            DeliveryReport::Ack => (None, None, None, None),
            DeliveryReport::Fail { error, retryable } => (error.as_deref(), *retryable, None, None),
            DeliveryReport::Defer { available_at, reason } => (None, None, reason.as_deref(), Some(*available_at)),
        };
        let (retry_no, redriven_seq) = (0, None);
        let as_reported =
            Self { scope, agent, seq, state: asked, error, retryable, reason, available_at, retry_no, redriven_seq };
        match *outcome {
            FailureOutcome::None => as_reported,
            FailureOutcome::Retry { at, retry_no } => {
                Self { state: Settlement::Deferred, available_at: Some(at), retry_no, ..as_reported }
            }
            FailureOutcome::Redriven { seq } => Self { redriven_seq: Some(seq), ..as_reported },
            FailureOutcome::DeadLetter(reason) => Self {
                state: Settlement::DeadLettered,
                retryable: Some(false),
                reason: Some(reason.as_str()),
                ..as_reported
            },
        }
    }

    /// Writes the settlement in the place of the current one; returns false if that changes nothing.
    ///
    /// Every writer of settlements locks the cursor row first, so the state cannot have changed since it was read; the
    /// WHERE repeats it. A repeated equal deferral changes nothing.
    async fn replace(&self, tx: &mut Transaction, current: Option<Settlement>) -> StoreResult<bool> {
        let done = sqlx::query(
            "INSERT INTO delivery_exceptions AS x
                    (workspace_id, agent_id, seq, state, error, retryable, reason, available_at, at, retry_no,
                     redriven_seq, redriven_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, relay_now(), $10, $11,
                     CASE WHEN $11::bigint IS NOT NULL THEN relay_now() END)
             ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
                SET state = excluded.state, error = excluded.error, retryable = excluded.retryable,
                    reason = excluded.reason, available_at = excluded.available_at, at = excluded.at,
                    retry_no = excluded.retry_no, redriven_seq = coalesce(x.redriven_seq, excluded.redriven_seq),
                    redriven_at = coalesce(x.redriven_at, excluded.redriven_at)
              WHERE x.state IS NOT DISTINCT FROM $9
                AND (x.state, x.reason, x.available_at)
                    IS DISTINCT FROM (excluded.state, excluded.reason, excluded.available_at)",
        )
        .bind(self.scope.workspace_id())
        .bind(self.agent)
        .bind(self.seq)
        .bind(self.state.code())
        .bind(self.error)
        .bind(self.retryable)
        .bind(self.reason)
        .bind(self.available_at)
        .bind(current)
        .bind(self.retry_no)
        .bind(self.redriven_seq)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("settling a delivery"))?;
        Ok(done.rows_affected() > 0)
    }
}

/// Moves the settled floor over the individually settled rows right above it. The caller holds the cursor row. Returns
/// the new floor.
pub(crate) async fn settle_contiguous(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
    from: Seq,
) -> StoreResult<Seq> {
    let doing = "extending a settled floor";
    let workspace = scope.workspace_id();
    let mut floor = from;
    loop {
        let page: Vec<(Seq, Seq)> = sqlx::query_as(
            // Acked, failed and dead-lettered rows and skipped runs are settled; deferred rows are not.
            formatcp!(
                "SELECT first_seq, last_seq
               FROM ((SELECT seq AS first_seq, seq AS last_seq FROM delivery_exceptions
                       WHERE workspace_id = $1 AND agent_id = $2 AND seq > $3 AND state <> {DEFERRED}
                       ORDER BY seq LIMIT $4)
                     UNION ALL
                     SELECT first_seq, last_seq FROM skipped_seqs
                      WHERE workspace_id = $1 AND agent_id = $2 AND last_seq > $3) AS settled
              ORDER BY first_seq LIMIT $4"
            ),
        )
        .bind(workspace)
        .bind(agent)
        .bind(floor)
        .bind(FLOOR_PAGE)
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let reached = extend_floor(floor, page.iter().flat_map(|&(first, last)| first..=last));
        // A full page without a hole: rows behind it may follow without a hole, too.
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
