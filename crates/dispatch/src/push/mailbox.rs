//! Dispatch of one mailbox: its rows in order, or concurrently where the node allows it.

use std::{
    collections::VecDeque,
    ops::ControlFlow,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use relay_domain::{
    mailboxes::{delivery::Settlement, stream::Seq},
    push::{
        PushOrdering,
        attempt::{AttemptOutcome, PushAttempt},
        mailbox::{LeasedMailbox, MailboxRelease, PushPage, PushRow},
    },
};
use tokio::sync::oneshot;

use super::{HeldPage, PushDispatcher, ServedMailbox, attempt, endpoints::Endpoint, request};

/// Time that an idle mailbox is kept, so that its next rows need no claim.
const LINGER: Duration = Duration::from_secs(2);
/// Bound of the unrecorded attempts of a mailbox while the next one is made. If the worker crashes, others repeat at
/// most as many.
const MAX_UNRECORDED: usize = 32;
/// The next page is requested when so many rows are left.
const PREFETCH_ROWS: usize = 16;
/// Pause of a mailbox whose task has panicked.
const PANIC_PAUSE: chrono::Duration = chrono::Duration::seconds(30);
/// Pause after storage was unavailable.
const RETRY_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, Default)]
struct PageOutcome {
    /// Time of the next due row.
    due_at: Option<DateTime<Utc>>,
    /// True if no row may be sent before `due_at`.
    is_blocked: bool,
    /// True to read the next page at once.
    again: bool,
    /// True if the mailbox belongs to another worker now.
    is_lost: bool,
}

impl PageOutcome {
    fn set_due(&mut self, at: DateTime<Utc>) {
        self.due_at = Some(self.due_at.map_or(at, |due| due.min(at)));
    }

    fn block_until(mut self, at: DateTime<Utc>) -> Self {
        self.due_at = Some(at);
        self.is_blocked = true;
        self
    }

    /// Waits for a row. A returning row does not block those behind it.
    fn wait_for_row(&mut self, row: &PushRow, at: DateTime<Utc>) -> ControlFlow<()> {
        if row.is_redelivery {
            self.set_due(at);
            return ControlFlow::Continue(());
        }
        *self = self.block_on_row(row, at);
        ControlFlow::Break(())
    }

    /// Blocks the mailbox on a waiting row, but no longer than the row lives.
    fn block_on_row(self, row: &PushRow, at: DateTime<Utc>) -> Self {
        self.block_until(at.min(row.delivery.expires_at))
    }
}

/// Next action for a row.
enum RowAction {
    /// Nothing to send.
    Skip,
    /// Its recipient deferred it.
    Postpone(DateTime<Utc>),
    /// Its next attempt is due then.
    Wait(DateTime<Utc>),
    /// It is due.
    Attempt,
}

/// Serves a mailbox until it is idle, lost, or the worker stops; then releases it.
pub(super) async fn serve(pusher: &Arc<PushDispatcher>, mailbox: LeasedMailbox, served: &ServedMailbox) {
    let taken = mailbox.clone();
    if AssertUnwindSafe(serve_until_idle(pusher, mailbox, served)).catch_unwind().await.is_err() {
        // While this worker lives, no other would take it. The pause keeps the next worker from panicking at once.
        let due_at = Some(pusher.storage.now() + PANIC_PAUSE);
        release_mailbox(pusher, MailboxRelease { mailbox: taken, due_at, is_blocked: true }).await;
    }
}

async fn serve_until_idle(pusher: &Arc<PushDispatcher>, mut mailbox: LeasedMailbox, served: &ServedMailbox) {
    let mut page_outcome = PageOutcome { again: true, ..PageOutcome::default() };
    let mut pipeline = Pipeline { recorded: mailbox.pushed_seq, ..Pipeline::default() };
    while !pusher.stop.is_cancelled() && pusher.lease.covers_attempt() {
        page_outcome = serve_page(pusher, served, &mut mailbox, &mut pipeline).await;
        // Only while the next page is read ahead may attempts continue before the last ones are recorded.
        if pipeline.next.is_none() || page_outcome.is_lost {
            page_outcome.is_lost |= !pipeline.unrecorded.wait_all().await;
        }
        if page_outcome.is_lost {
            break;
        }
        if pipeline.unrecorded.is_empty() {
            pipeline.recorded = mailbox.pushed_seq;
        }
        if page_outcome.again {
            continue;
        }
        let now = pusher.storage.now();
        let until_due = page_outcome.due_at.map(|at| (at - now).to_std().unwrap_or_default()); // zero if overdue
        if page_outcome.is_blocked && until_due.is_some_and(|wait| wait > LINGER) {
            break;
        }
        let pause = until_due.map_or(LINGER, |wait| wait.min(LINGER));
        let woken = tokio::select! {
            () = served.wake.notified() => true,
            () = tokio::time::sleep(pause) => until_due.is_some_and(|wait| wait <= LINGER),
            () = pusher.stop.cancelled() => false,
        };
        if !woken {
            break;
        }
    }
    if !pipeline.unrecorded.wait_all().await || page_outcome.is_lost {
        // An unrecorded attempt is not passed: the next worker repeats it.
        mailbox.pushed_seq = pipeline.recorded;
        page_outcome.again = true;
    }
    if page_outcome.again {
        page_outcome = PageOutcome::default();
        page_outcome.set_due(pusher.storage.now());
    }
    release_mailbox(
        pusher,
        MailboxRelease { mailbox, due_at: page_outcome.due_at, is_blocked: page_outcome.is_blocked },
    )
    .await;
}

/// Releases a mailbox; one that belongs to another worker by now is unaffected. No other worker takes it while this one
/// lives, so this retries until it succeeds.
async fn release_mailbox(pusher: &Arc<PushDispatcher>, release: MailboxRelease) {
    while let Err(error) = pusher.storage.release(&release).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "failed to release a mailbox, will retry");
        // When the worker stops, `retire` releases all of its mailboxes.
        if pusher.stop.is_cancelled() {
            return;
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

async fn serve_page(
    pusher: &Arc<PushDispatcher>,
    served: &ServedMailbox,
    mailbox: &mut LeasedMailbox,
    pipeline: &mut Pipeline,
) -> PageOutcome {
    let again = PageOutcome { again: true, ..PageOutcome::default() };
    let requested = match pipeline.next.take().filter(|next| next.from == mailbox.pushed_seq) {
        Some(requested) => requested,
        None => RequestedPage::request(pusher, served, mailbox, mailbox.pushed_seq).await,
    };
    let epoch = requested.epoch;
    let Some(HeldPage { page, _memory }) = requested.answer.await.ok().flatten() else {
        tokio::time::sleep(RETRY_AFTER).await;
        return again;
    };
    if !page.is_leased {
        return PageOutcome { is_lost: true, ..PageOutcome::default() };
    }
    let now = pusher.storage.now();
    if page.rows.iter().any(|row| is_overdue(row, now)) {
        // Attempts made in time must be recorded before the expiry.
        if !pipeline.unrecorded.wait_all().await {
            return PageOutcome { is_lost: true, ..PageOutcome::default() };
        }
        if pusher.storage.expire(mailbox.key()).await.is_err() {
            tokio::time::sleep(RETRY_AFTER).await;
        }
        return again;
    }
    let endpoint = match pusher.endpoints.get(mailbox.scope, &mailbox.node_id).await {
        Ok(Some(endpoint)) => endpoint,
        // The agent has moved; the sweep finds its mailbox.
        Ok(None) => return PageOutcome::default().block_until(now + chrono::Duration::seconds(30)),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to read the settings of an endpoint");
            return PageOutcome::default().block_until(now + chrono::Duration::seconds(5));
        }
    };
    let run = PageRun { pusher, served, endpoint: &endpoint, page: &page, epoch };
    let mut page_outcome = match endpoint.ordering {
        PushOrdering::Seq => run.serve_in_order(mailbox, pipeline).await,
        PushOrdering::None => run.serve_concurrently(mailbox).await,
    };
    if let Some(at) = page.next_redelivery_at
        && !page_outcome.is_blocked
    {
        page_outcome.set_due(at);
    }
    page_outcome.again |= page.has_more && !page_outcome.is_blocked;
    page_outcome
}

fn is_overdue(row: &PushRow, now: DateTime<Utc>) -> bool {
    let is_terminal = row.delivery.settlement.is_some_and(Settlement::is_settled);
    row.delivery.expires_at <= now && !is_terminal
}

fn row_action(row: &PushRow, now: DateTime<Utc>) -> RowAction {
    match (row.delivery.settlement, row.available_at) {
        (Some(settlement), _) if settlement.is_settled() => RowAction::Skip,
        (Some(_), Some(at)) if at > now && row.is_deferred_by_consumer => RowAction::Postpone(at),
        (Some(_), Some(at)) if at > now => RowAction::Wait(at),
        _ if row.delivery.is_dropped() => RowAction::Skip,
        _ => RowAction::Attempt,
    }
}

/// Work in progress beside the attempts of a page.
#[derive(Default)]
struct Pipeline {
    unrecorded: PendingRecords,
    next: Option<RequestedPage>,
    /// Everything up to here is recorded.
    recorded: Seq,
}

/// Page requested from the reader.
struct RequestedPage {
    from: Seq,
    /// Read before the request, so that later changes are noticed.
    epoch: (u64, u64),
    answer: oneshot::Receiver<Option<HeldPage>>,
}

impl RequestedPage {
    async fn request(pusher: &PushDispatcher, served: &ServedMailbox, mailbox: &LeasedMailbox, from: Seq) -> Self {
        let epoch = pusher.epoch(served);
        Self { from, epoch, answer: pusher.reader.request_page(mailbox, from).await }
    }
}

/// Attempts that wait to be recorded.
#[derive(Default)]
struct PendingRecords(VecDeque<oneshot::Receiver<bool>>);

impl PendingRecords {
    /// Adds an attempt; returns false when the mailbox was lost.
    async fn push(&mut self, answer: oneshot::Receiver<bool>) -> bool {
        self.0.push_back(answer);
        if self.0.len() < MAX_UNRECORDED {
            return true;
        }
        match self.0.pop_front() {
            Some(oldest) => oldest.await.unwrap_or(false),
            None => true,
        }
    }

    async fn wait_all(&mut self) -> bool {
        let mut is_leased = true;
        for answer in self.0.drain(..) {
            is_leased &= answer.await.unwrap_or(false);
        }
        is_leased
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// One page of rows that a mailbox's task works on.
#[derive(Clone, Copy)]
struct PageRun<'a> {
    pusher: &'a Arc<PushDispatcher>,
    served: &'a ServedMailbox,
    endpoint: &'a Endpoint,
    page: &'a PushPage,
    /// Read before the page was requested: rows of an older epoch may be outdated.
    epoch: (u64, u64),
}

impl PageRun<'_> {
    /// Attempts rows in order. A failed row blocks those behind it.
    async fn serve_in_order(self, mailbox: &mut LeasedMailbox, pipeline: &mut Pipeline) -> PageOutcome {
        let rows = &self.page.rows;
        let mut page_outcome = PageOutcome::default();
        // A returning row must not be read again before its outcome is recorded.
        let goes_on = self.page.has_more && !rows.iter().any(|row| row.is_redelivery);
        for (nth, row) in rows.iter().enumerate() {
            if goes_on
                && nth + PREFETCH_ROWS == rows.len()
                && let Some(last) = rows.last()
            {
                let next = RequestedPage::request(self.pusher, self.served, mailbox, last.delivery.seq);
                pipeline.next = Some(next.await);
            }
            let flow = match row_action(row, self.pusher.storage.now()) {
                RowAction::Skip => {
                    pass_row(mailbox, row);
                    ControlFlow::Continue(())
                }
                RowAction::Postpone(at) => {
                    page_outcome.set_due(at);
                    pass_row(mailbox, row);
                    ControlFlow::Continue(())
                }
                RowAction::Wait(at) => page_outcome.wait_for_row(row, at),
                RowAction::Attempt => self.attempt_in_order(mailbox, row, pipeline, &mut page_outcome).await,
            };
            if flow.is_break() {
                break;
            }
        }
        if page_outcome.is_blocked || page_outcome.is_lost || page_outcome.again {
            // Without a page read ahead, all attempts are recorded before the rows are read again.
            pipeline.next = None;
        }
        page_outcome
    }

    /// Attempts one row; breaks when the rows behind it must not be attempted now.
    async fn attempt_in_order(
        self,
        mailbox: &mut LeasedMailbox,
        row: &PushRow,
        pipeline: &mut Pipeline,
        page_outcome: &mut PageOutcome,
    ) -> ControlFlow<()> {
        let attempt = match self.attempt_row(mailbox, row).await {
            RowResult::Attempted(attempt) => *attempt,
            RowResult::Nothing => {
                pass_row(mailbox, row);
                return ControlFlow::Continue(());
            }
            RowResult::NotBefore(at) => {
                *page_outcome = page_outcome.block_on_row(row, at);
                return ControlFlow::Break(());
            }
            RowResult::Stale | RowResult::Unrecorded => {
                page_outcome.again = true;
                return ControlFlow::Break(());
            }
        };
        let outcome = attempt.outcome.clone();
        if !matches!(outcome, AttemptOutcome::Retry { .. } | AttemptOutcome::Disabled { .. }) {
            pass_row(mailbox, row);
        }
        // An ack or a dead letter settles the row, and a claim begins above the settled floor. Only a delivery without
        // an ack needs the position.
        let pushed_seq = (outcome == AttemptOutcome::Delivered).then_some(mailbox.pushed_seq);
        let answer = self.pusher.recorder.record(PushAttempt { pushed_seq, ..attempt }).await;
        if !pipeline.unrecorded.push(answer).await {
            page_outcome.is_lost = true;
            return ControlFlow::Break(());
        }
        match outcome {
            AttemptOutcome::Retry { at, .. } => page_outcome.wait_for_row(row, at),
            AttemptOutcome::Disabled { .. } => {
                page_outcome.is_lost = true;
                ControlFlow::Break(())
            }
            AttemptOutcome::Delivered | AttemptOutcome::Acked | AttemptOutcome::DeadLettered { .. } => {
                ControlFlow::Continue(())
            }
        }
    }

    /// Attempts rows concurrently, as many as the endpoint takes. They begin in order; a failed one returns by itself.
    async fn serve_concurrently(self, mailbox: &mut LeasedMailbox) -> PageOutcome {
        let mut page_outcome = PageOutcome::default();
        let own = mailbox.clone();
        let now = self.pusher.storage.now();
        // After the first row that was not attempted, no later one begins: the sent rows stay a contiguous run.
        let shut = AtomicBool::new(false);
        let mut begun: Vec<BoxFuture<'_, (&PushRow, RowAction, Option<RowResult>)>> =
            Vec::with_capacity(self.page.rows.len());
        for row in &self.page.rows {
            let (own, shut) = (&own, &shut);
            begun.push(Box::pin(async move {
                match row_action(row, now) {
                    RowAction::Attempt => {
                        (row, RowAction::Attempt, Some(self.attempt_unless_shut(own, row, shut).await))
                    }
                    action @ (RowAction::Skip | RowAction::Postpone(_) | RowAction::Wait(_)) => (row, action, None),
                }
            }));
        }
        let concurrency = self.pusher.endpoints.endpoint_concurrency();
        let results: Vec<_> = stream::iter(begun).buffered(concurrency).collect().await;
        let (mut is_run, mut not_before, mut is_stale) = (true, None::<DateTime<Utc>>, false);
        for (row, action, result) in results {
            match result {
                Some(RowResult::NotBefore(at)) => {
                    not_before = Some(at);
                    is_run &= row.is_redelivery;
                }
                Some(RowResult::Stale) => {
                    is_stale = true;
                    is_run &= row.is_redelivery;
                }
                Some(RowResult::Attempted(attempt)) => match attempt.outcome {
                    AttemptOutcome::Retry { at, .. } => page_outcome.set_due(at),
                    AttemptOutcome::Disabled { .. } => page_outcome.is_lost = true,
                    AttemptOutcome::Delivered | AttemptOutcome::Acked | AttemptOutcome::DeadLettered { .. } => {}
                },
                // The next worker begins with it.
                Some(RowResult::Unrecorded) => {
                    page_outcome.is_lost = true;
                    is_run = false;
                }
                Some(RowResult::Nothing) | None => {}
            }
            if let RowAction::Postpone(at) | RowAction::Wait(at) = action {
                page_outcome.set_due(at);
            }
            if is_run {
                pass_row(mailbox, row);
            }
        }
        // A failed row returns by itself; a row that did not begin waits for the endpoint, or is read again.
        match not_before {
            Some(at) => page_outcome.block_until(at),
            None => PageOutcome { again: is_stale, ..page_outcome },
        }
    }

    /// Attempts and records one of the concurrent rows, and shuts the run when later rows must not begin.
    async fn attempt_unless_shut(self, mailbox: &LeasedMailbox, row: &PushRow, shut: &AtomicBool) -> RowResult {
        if shut.load(Relaxed) {
            return RowResult::Stale;
        }
        match self.attempt_row(mailbox, row).await {
            RowResult::Attempted(attempt) => {
                let attempt = PushAttempt { pushed_seq: Some(mailbox.pushed_seq), ..*attempt };
                let is_leased = self.pusher.recorder.record(attempt.clone()).await.await.unwrap_or(false);
                if !is_leased || matches!(attempt.outcome, AttemptOutcome::Disabled { .. }) {
                    shut.store(true, Relaxed);
                }
                if is_leased { RowResult::Attempted(Box::new(attempt)) } else { RowResult::Unrecorded }
            }
            RowResult::Nothing => RowResult::Nothing,
            result @ (RowResult::NotBefore(_) | RowResult::Stale | RowResult::Unrecorded) => {
                shut.store(true, Relaxed);
                result
            }
        }
    }

    async fn attempt_row(self, mailbox: &LeasedMailbox, row: &PushRow) -> RowResult {
        let Self { pusher, endpoint, .. } = self;
        let bytes = request::approximate_bytes(&row.delivery);
        let permit = match pusher.endpoints.acquire_permit(endpoint, bytes, || pusher.is_crowded()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(until)) => return RowResult::NotBefore(until),
            Err(_) => return RowResult::NotBefore(pusher.storage.now() + chrono::Duration::seconds(1)),
        };
        let _memory = pusher.calls.reserve(endpoint.family, bytes).await;
        // These waits may have been long.
        let is_stale =
            pusher.epoch(self.served) != self.epoch || !pusher.lease.covers_attempt() || pusher.stop.is_cancelled();
        if is_stale || is_overdue(row, pusher.storage.now()) {
            return RowResult::Stale;
        }
        let attempt = attempt::attempt_delivery(pusher, endpoint, mailbox, row).await;
        drop(permit);
        attempt.map_or(RowResult::Nothing, |attempt| RowResult::Attempted(Box::new(attempt)))
    }
}

/// Moves the position of a mailbox behind a row; returning rows are behind it already.
fn pass_row(mailbox: &mut LeasedMailbox, row: &PushRow) {
    if !row.is_redelivery {
        mailbox.pushed_seq = mailbox.pushed_seq.max(row.delivery.seq);
    }
}

enum RowResult {
    Attempted(Box<PushAttempt>),
    Nothing,
    /// The endpoint is paused until then.
    NotBefore(DateTime<Utc>),
    /// The rows may be outdated: read again.
    Stale,
    /// Attempted, but the outcome is not recorded.
    Unrecorded,
}
