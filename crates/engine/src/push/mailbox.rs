//! Serving one mailbox: its rows in order, or side by side where the node says so.

use std::{
    collections::VecDeque,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use relay_domain::{delivery::Exception, push::Ordering, session::Seq};
use relay_store::{
    push_mailboxes::{Release, TakenMailbox},
    push_read::{PAGE, PushPage, PushRow},
    push_record::{Outcome, Tried},
};
use tokio::sync::oneshot;

use super::{Pusher, Served, attempt, endpoints::Endpoint};

/// An idle mailbox is kept this long: what comes next needs no taking.
const LINGER: Duration = Duration::from_secs(2);
/// Tries of one mailbox that may wait to be recorded while the next one is under way. A worker that dies has others try
/// as many again, at most.
const UNRECORDED: usize = 32;
/// With so many rows of a page left, the next page is asked for.
const ASK_AHEAD: usize = 16;
/// A mailbox whose task has panicked is left alone for this long.
const AFTER_A_PANIC: chrono::Duration = chrono::Duration::seconds(30);
/// Pause before storage that was away is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// How a page went.
#[derive(Debug, Clone, Copy, Default)]
struct Went {
    /// When something is due again.
    due_at: Option<DateTime<Utc>>,
    /// Whether nothing goes before that.
    is_blocked: bool,
    /// Whether to read again right away.
    again: bool,
    /// Whether the mailbox is no longer ours.
    is_lost: bool,
}

impl Went {
    fn due(&mut self, at: DateTime<Utc>) {
        self.due_at = Some(self.due_at.map_or(at, |due| due.min(at)));
    }

    fn blocked(mut self, at: DateTime<Utc>) -> Self {
        self.due_at = Some(at);
        self.is_blocked = true;
        self
    }

    /// Blocked by a row that waits: no longer than it lives.
    fn blocked_by(self, row: &PushRow, at: DateTime<Utc>) -> Self {
        self.blocked(at.min(row.delivery.expires_at))
    }
}

/// What becomes of a row that was read.
enum Step {
    /// Nothing is to be sent for it.
    Pass,
    /// Its recipient wants it later.
    PutOff(DateTime<Utc>),
    /// Its next try is due then.
    Wait(DateTime<Utc>),
    /// It is to be tried.
    Try,
}

/// Serves a mailbox until it is idle, lost, or the worker stops; then gives it back.
pub(super) async fn serve(pusher: &Arc<Pusher>, mailbox: TakenMailbox, served: &Served) {
    let taken = mailbox.clone();
    if AssertUnwindSafe(serve_taken(pusher, mailbox, served)).catch_unwind().await.is_err() {
        // While this worker lives, nobody else would take it; whoever does next has not the same bug at once.
        let due_at = Some(pusher.engine.now() + AFTER_A_PANIC);
        give_back(pusher, Release { mailbox: taken, due_at, is_blocked: true }).await;
    }
}

async fn serve_taken(pusher: &Arc<Pusher>, mut mailbox: TakenMailbox, served: &Served) {
    let mut went = Went { again: true, ..Went::default() };
    let mut ahead = Ahead { recorded: mailbox.pushed_seq, ..Ahead::default() };
    while !pusher.stop.is_cancelled() && pusher.lease.covers_a_try() {
        went = serve_page(pusher, served, &mut mailbox, &mut ahead).await;
        // Only where the next page is known already, tries go on before the last ones are recorded.
        if ahead.next.is_none() || went.is_lost {
            went.is_lost |= !ahead.unrecorded.all().await;
        }
        if went.is_lost {
            break;
        }
        if ahead.unrecorded.is_empty() {
            ahead.recorded = mailbox.pushed_seq;
        }
        if went.again {
            continue;
        }
        let now = pusher.engine.now();
        let until_due = went.due_at.map(|at| (at - now).to_std().unwrap_or_default());
        if went.is_blocked && until_due.is_some_and(|wait| wait > LINGER) {
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
    if !ahead.unrecorded.all().await || went.is_lost {
        // What may not be recorded is not passed over: whoever comes next tries it again.
        mailbox.pushed_seq = ahead.recorded;
        went.again = true;
    }
    if went.again {
        went = Went::default();
        went.due(pusher.engine.now());
    }
    give_back(pusher, Release { mailbox, due_at: went.due_at, is_blocked: went.is_blocked }).await;
}

/// Gives a mailbox back; one that has become somebody else's is left alone. Nobody else would take it while this
/// worker lives, so this is tried until it is done.
async fn give_back(pusher: &Arc<Pusher>, release: Release) {
    let release = [release];
    while let Err(error) = pusher.engine.store().release_mailboxes(pusher.owner, &release).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "a mailbox was not given back");
        if pusher.stop.is_cancelled() {
            return;
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

async fn serve_page(pusher: &Arc<Pusher>, served: &Served, mailbox: &mut TakenMailbox, ahead: &mut Ahead) -> Went {
    let again = Went { again: true, ..Went::default() };
    let asked = match ahead.next.take().filter(|next| next.from == mailbox.pushed_seq) {
        Some(asked) => asked,
        None => Asked::for_page(pusher, served, mailbox, mailbox.pushed_seq).await,
    };
    let epoch = asked.epoch;
    let Some(page) = asked.answer.await.ok().flatten() else {
        tokio::time::sleep(ASK_AGAIN).await;
        return again;
    };
    if !page.is_ours {
        return Went { is_lost: true, ..Went::default() };
    }
    let now = pusher.engine.now();
    if page.rows.iter().any(|row| is_overdue(row, now)) {
        // What was handed over in time is to be known as that first.
        if !ahead.unrecorded.all().await {
            return Went { is_lost: true, ..Went::default() };
        }
        if pusher.engine.dead_letter_expired(&[(mailbox.scope, mailbox.agent_id)]).await.is_err() {
            tokio::time::sleep(ASK_AGAIN).await;
        }
        return again;
    }
    let endpoint = match pusher.endpoints.get(mailbox.scope, &mailbox.node_id).await {
        Ok(Some(endpoint)) => endpoint,
        // The sweep finds out what has become of its agent.
        Ok(None) => return Went::default().blocked(now + chrono::Duration::seconds(30)),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "an endpoint's settings could not be read");
            return Went::default().blocked(now + chrono::Duration::seconds(5));
        }
    };
    let mut went = match endpoint.ordering {
        Ordering::Seq => in_order(pusher, served, &endpoint, mailbox, &page, epoch, ahead).await,
        Ordering::None => side_by_side(pusher, served, &endpoint, mailbox, &page, epoch).await,
    };
    if let Some(at) = page.next_back_at
        && !went.is_blocked
    {
        went.due(at);
    }
    let full = i64::try_from(page.rows.len()).is_ok_and(|rows| rows >= PAGE);
    went.again |= full && !went.is_blocked;
    went
}

fn is_overdue(row: &PushRow, now: DateTime<Utc>) -> bool {
    let is_terminal = row.delivery.exception.is_some_and(Exception::is_settled);
    row.delivery.expires_at <= now && !is_terminal
}

fn step(row: &PushRow, now: DateTime<Utc>) -> Step {
    match (row.delivery.exception, row.available_at) {
        (Some(exception), _) if exception.is_settled() => Step::Pass,
        (Some(_), Some(at)) if at > now && row.by_consumer => Step::PutOff(at),
        (Some(_), Some(at)) if at > now => Step::Wait(at),
        _ if row.delivery.message.is_none() && row.delivery.outcome.is_none() => Step::Pass,
        _ => Step::Try,
    }
}

/// What is under way beside the tries of a page.
#[derive(Default)]
struct Ahead {
    unrecorded: Unrecorded,
    next: Option<Asked>,
    /// Everything up to here is recorded.
    recorded: Seq,
}

/// A page that was asked for.
struct Asked {
    from: Seq,
    /// Taken before it was asked for.
    epoch: (u64, u64),
    answer: oneshot::Receiver<Option<PushPage>>,
}

impl Asked {
    async fn for_page(pusher: &Pusher, served: &Served, mailbox: &TakenMailbox, from: Seq) -> Self {
        let epoch = pusher.epoch(served);
        Self { from, epoch, answer: pusher.reader.ask(mailbox, from).await }
    }
}

/// Tries that were handed over to be recorded.
#[derive(Default)]
struct Unrecorded(VecDeque<oneshot::Receiver<bool>>);

impl Unrecorded {
    /// Whether the mailbox is still ours, as far as is known.
    async fn push(&mut self, answer: oneshot::Receiver<bool>) -> bool {
        self.0.push_back(answer);
        if self.0.len() < UNRECORDED {
            return true;
        }
        match self.0.pop_front() {
            Some(oldest) => oldest.await.unwrap_or(false),
            None => true,
        }
    }

    async fn all(&mut self) -> bool {
        let mut ours = true;
        for answer in self.0.drain(..) {
            ours &= answer.await.unwrap_or(false);
        }
        ours
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// One row after the other. One that fails holds up those behind it.
async fn in_order(
    pusher: &Arc<Pusher>,
    served: &Served,
    endpoint: &Arc<Endpoint>,
    mailbox: &mut TakenMailbox,
    page: &PushPage,
    epoch: (u64, u64),
    ahead: &mut Ahead,
) -> Went {
    let mut went = Went::default();
    let is_full = i64::try_from(page.rows.len()).is_ok_and(|rows| rows >= PAGE);
    // A row that has come back is not to be read again before what came of it is recorded.
    let goes_on = is_full && !page.rows.iter().any(|row| row.is_back);
    for (nth, row) in page.rows.iter().enumerate() {
        if goes_on
            && nth + ASK_AHEAD == page.rows.len()
            && let Some(last) = page.rows.last()
        {
            ahead.next = Some(Asked::for_page(pusher, served, mailbox, last.delivery.seq).await);
        }
        let passed = |mailbox: &mut TakenMailbox| {
            if !row.is_back {
                mailbox.pushed_seq = mailbox.pushed_seq.max(row.delivery.seq);
            }
        };
        let now = pusher.engine.now();
        match step(row, now) {
            Step::Pass => passed(mailbox),
            Step::PutOff(at) => {
                went.due(at);
                passed(mailbox);
            }
            Step::Wait(at) if row.is_back => went.due(at),
            Step::Wait(at) => {
                went = went.blocked_by(row, at);
                break;
            }
            Step::Try => {
                let tried = match try_row(pusher, served, endpoint, mailbox, row, epoch).await {
                    Turn::Tried(tried) => *tried,
                    Turn::Nothing => {
                        passed(mailbox);
                        continue;
                    }
                    Turn::NotBefore(at) => {
                        went = went.blocked_by(row, at);
                        break;
                    }
                    Turn::Stale | Turn::Unrecorded => {
                        went.again = true;
                        break;
                    }
                };
                let outcome = tried.outcome.clone();
                let is_retry = matches!(outcome, Outcome::Retry { .. } | Outcome::Disabled { .. });
                if !is_retry {
                    passed(mailbox);
                }
                let pushed_seq = (outcome == Outcome::Delivered).then_some(mailbox.pushed_seq);
                let answer = pusher.recorder.record(Tried { pushed_seq, ..tried }).await;
                if !ahead.unrecorded.push(answer).await {
                    went.is_lost = true;
                    break;
                }
                match outcome {
                    Outcome::Retry { at, .. } if row.is_back => went.due(at),
                    Outcome::Retry { at, .. } => {
                        went = went.blocked_by(row, at);
                        break;
                    }
                    Outcome::Disabled { .. } => {
                        went.is_lost = true;
                        break;
                    }
                    _ => {}
                }
            }
        }
    }
    if went.is_blocked || went.is_lost || went.again {
        ahead.next = None;
    }
    went
}

/// Rows side by side, as many as the endpoint takes. They begin in order; one that fails comes back by itself.
async fn side_by_side(
    pusher: &Arc<Pusher>,
    served: &Served,
    endpoint: &Arc<Endpoint>,
    mailbox: &mut TakenMailbox,
    page: &PushPage,
    epoch: (u64, u64),
) -> Went {
    let mut went = Went::default();
    let reached = mailbox.pushed_seq;
    let own = mailbox.clone();
    let now = pusher.engine.now();
    // Once one row was not tried, those behind it are not begun either: what was handed over stays a run.
    let shut = AtomicBool::new(false);
    let mut begun: Vec<BoxFuture<'_, (&PushRow, Step, Option<Turn>)>> = Vec::with_capacity(page.rows.len());
    for row in &page.rows {
        let (own, shut) = (&own, &shut);
        begun.push(Box::pin(async move {
            let step = step(row, now);
            if !matches!(step, Step::Try) {
                return (row, step, None);
            }
            if shut.load(Relaxed) {
                return (row, step, Some(Turn::Stale));
            }
            let turn = match try_row(pusher, served, endpoint, own, row, epoch).await {
                Turn::Tried(tried) => {
                    let tried = Tried { pushed_seq: Some(reached), ..*tried };
                    let ours = pusher.recorder.record(tried.clone()).await.await.unwrap_or(false);
                    if !ours || matches!(tried.outcome, Outcome::Disabled { .. }) {
                        shut.store(true, Relaxed);
                    }
                    if ours { Turn::Tried(Box::new(tried)) } else { Turn::Unrecorded }
                }
                Turn::Nothing => Turn::Nothing,
                turn => {
                    shut.store(true, Relaxed);
                    turn
                }
            };
            (row, step, Some(turn))
        }));
    }
    let turns: Vec<_> = stream::iter(begun).buffered(pusher.endpoints.of_one()).collect().await;
    let (mut is_run, mut not_before, mut is_stale) = (true, None::<DateTime<Utc>>, false);
    for (row, step, turn) in turns {
        match turn {
            Some(Turn::NotBefore(at)) => {
                not_before = Some(at);
                is_run &= row.is_back;
            }
            Some(Turn::Stale) => {
                is_stale = true;
                is_run &= row.is_back;
            }
            Some(Turn::Tried(tried)) => match tried.outcome {
                Outcome::Retry { at, .. } => went.due(at),
                Outcome::Disabled { .. } => went.is_lost = true,
                _ => {}
            },
            // Whoever serves the mailbox next begins with it.
            Some(Turn::Unrecorded) => {
                went.is_lost = true;
                is_run = false;
            }
            Some(Turn::Nothing) | None => {}
        }
        if let Step::PutOff(at) | Step::Wait(at) = step {
            went.due(at);
        }
        if is_run && !row.is_back {
            mailbox.pushed_seq = mailbox.pushed_seq.max(row.delivery.seq);
        }
    }
    // What failed comes back by itself; what was not begun waits for the endpoint, or is read again.
    match not_before {
        Some(at) => went.blocked(at),
        None => Went { again: is_stale, ..went },
    }
}

/// What came of a row's turn.
enum Turn {
    Tried(Box<Tried>),
    /// There is nothing to send.
    Nothing,
    /// The endpoint is left alone until then.
    NotBefore(DateTime<Utc>),
    /// What was read may no longer hold: read again.
    Stale,
    /// It was tried, and what came of it is not recorded.
    Unrecorded,
}

async fn try_row(
    pusher: &Arc<Pusher>,
    served: &Served,
    endpoint: &Arc<Endpoint>,
    mailbox: &TakenMailbox,
    row: &PushRow,
    epoch: (u64, u64),
) -> Turn {
    let pass = match pusher.endpoints.pass(endpoint, || pusher.is_crowded()).await {
        Ok(Ok(pass)) => pass,
        Ok(Err(until)) => return Turn::NotBefore(until),
        Err(_) => return Turn::NotBefore(pusher.engine.now() + chrono::Duration::seconds(1)),
    };
    // The wait for a turn may have been long.
    let is_stale = pusher.epoch(served) != epoch || !pusher.lease.covers_a_try() || pusher.stop.is_cancelled();
    if is_stale || is_overdue(row, pusher.engine.now()) {
        return Turn::Stale;
    }
    let tried = attempt::attempt(pusher, endpoint, mailbox, row).await;
    drop(pass);
    tried.map_or(Turn::Nothing, |tried| Turn::Tried(Box::new(tried)))
}
