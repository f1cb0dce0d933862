//! Dead letters: listed, counted, redriven, purged.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, DeliveryId, RedriveId, WorkspaceId, WorkspaceScope,
    mailboxes::{
        dead_letter::{DeadLetter, DeadLetterReason, MAX_REDRIVES, REDRIVE_RATE, Redrive},
        stream::Seq,
    },
    metric_names,
};
pub use relay_store::mailboxes::{
    dead_letters::DeadLetterFilter,
    redrives::{NewRedrive, RedriveOutcome},
};

use relay_store::{Store, events::RecordedEvents};

use super::Mailboxes;
use crate::{
    EngineError, EngineResult, IdSource,
    error::{Conflict, Fault, Missing},
};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 200);
const PURGE_BATCH: i64 = 5000;
/// Share of a redrive in one step: as many letters as its rate allows in this time.
const STEP: TimeDelta = TimeDelta::milliseconds(250);
/// Lease of the worker number for ids; bounds the duration of a command.
const ADMIN_LEASE_SECONDS: i32 = 60;
/// Bound of the steps per tick, so that other loops get a turn.
const STEPS_PER_TICK: usize = 20;

/// Filter of dead letters as callers write it.
#[derive(Debug, Clone, Default)]
pub struct DeadLetterQuery {
    /// Name or id.
    pub agent: Option<String>,
    /// Name or id.
    pub node: Option<String>,
    pub reason: Option<String>,
    /// Dead-lettered at this time or later.
    pub from: Option<DateTime<Utc>>,
    /// Dead-lettered before this time.
    pub until: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetterCount {
    pub total: i64,
    /// By reason; reasons without letters are left out.
    pub by_reason: Vec<(DeadLetterReason, i64)>,
}

impl Mailboxes {
    /// Lists dead letters, newest first, behind the one that `before` names.
    ///
    /// # Errors
    /// When a field is invalid, or `before` is no dead letter.
    pub async fn dead_letters(
        &self,
        scope: WorkspaceScope,
        query: &DeadLetterQuery,
        before: Option<DeliveryId>,
        limit: i64,
    ) -> EngineResult<Vec<DeadLetter>> {
        let filter = resolve_filter(&self.core.store, scope, query).await?;
        let before = match before {
            Some(id) => Some(self.dead_letter(scope, id).await?),
            None => None,
        };
        let _permit = self.core.acquire_scan_permit(scope).await?;
        Ok(self.core.store.dead_letters(scope, &filter, before.as_ref(), limit).await?)
    }

    pub async fn dead_letter(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<DeadLetter> {
        self.core.store.dead_letter(scope, id).await?.ok_or(EngineError::NotFound(Missing::Delivery))
    }

    /// Counts dead letters; with `redrivable` only those not redriven yet.
    ///
    /// # Errors
    /// When a field is invalid.
    pub async fn count_dead_letters(
        &self,
        scope: WorkspaceScope,
        query: &DeadLetterQuery,
        redrivable: bool,
    ) -> EngineResult<DeadLetterCount> {
        let _permit = self.core.acquire_scan_permit(scope).await?;
        count_matching(&self.core.store, scope, query, redrivable).await
    }

    /// Redrives one dead letter and returns the new delivery with its seq. Idempotent.
    ///
    /// # Errors
    /// When there is no such letter, or it cannot be redriven.
    pub async fn redrive_one(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<(DeliveryId, Seq)> {
        let done = redrive_one(&self.core.store, scope, id, self.core.now()).await?;
        if done.now {
            metrics::counter!(metric_names::DELIVERIES_REDRIVEN).increment(1);
            self.core.hints.deliveries_redriven(&[(scope, id.agent)]);
        }
        if let Some(recorded) = done.recorded {
            self.core.announce(recorded);
        }
        Ok((done.fresh, done.seq))
    }

    /// Begins to redrive all dead letters of a filter, `rate` a second. Workers do it; letters redriven before are
    /// skipped, so repeating it redrives nothing twice.
    ///
    /// # Errors
    /// When a field or the rate is invalid.
    pub async fn redrive_all(
        &self,
        scope: WorkspaceScope,
        query: &DeadLetterQuery,
        rate: Option<i32>,
    ) -> EngineResult<Redrive> {
        begin_redrive(&self.core.store, scope, query, rate, RedriveId::new(self.core.next_id()), self.core.now()).await
    }

    /// Returns the progress of a redrive.
    pub async fn redrive(&self, scope: WorkspaceScope, id: RedriveId) -> EngineResult<Redrive> {
        self.core.store.redrive(scope, id).await?.ok_or(EngineError::NotFound(Missing::Redrive))
    }

    /// Purges all dead letters of a filter. Returns their number.
    ///
    /// # Errors
    /// When a field is invalid.
    pub async fn purge_dead_letters(&self, scope: WorkspaceScope, query: &DeadLetterQuery) -> EngineResult<u64> {
        purge_matching(&self.core.store, scope, query, self.core.now(), |_| {}).await
    }

    /// Purges one dead letter.
    pub async fn purge_dead_letter(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<()> {
        let letter = self.dead_letter(scope, id).await?;
        let done = self.core.store.purge_dead_letter(scope, letter.agent_id, letter.seq, self.core.now()).await?;
        if done { Ok(()) } else { Err(EngineError::NotFound(Missing::Delivery)) }
    }

    /// Steps due redrives. Returns the number of redriven letters, true if more are due, and the delay.
    pub(crate) async fn step_redrives(&self) -> EngineResult<(u64, bool, Duration)> {
        let (mut redriven, mut late) = (0, 0.0_f64);
        for _ in 0..STEPS_PER_TICK {
            let Some(step) = self.core.store.redrive_step(STEP, self.core.now()).await? else {
                return Ok((redriven, false, Duration::from_secs_f64(late)));
            };
            late = late.max(step.late_seconds);
            redriven += step.redriven;
            metrics::counter!(metric_names::DELIVERIES_REDRIVEN).increment(step.redriven);
            let mailboxes: Vec<_> = step.mailboxes.iter().map(|agent| (step.scope, *agent)).collect();
            self.core.hints.deliveries_redriven(&mailboxes);
            if let Some(recorded) = step.recorded {
                self.core.announce(recorded);
            }
        }
        Ok((redriven, true, Duration::from_secs_f64(late)))
    }
}

/// Dead letters for an operator at a terminal: uses the database alone, without an engine.
pub struct DeadLetterAdmin {
    store: Store,
    scope: WorkspaceScope,
    ids: IdSource,
}

impl DeadLetterAdmin {
    /// Connects to the database.
    ///
    /// # Errors
    /// When there is no such workspace.
    pub async fn open(database_url: &str, workspace: WorkspaceId) -> EngineResult<Self> {
        let store = Store::connect(database_url, 1)?;
        let scope = WorkspaceScope::from_engine_row(workspace);
        store.workspace(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        let owner = format!("relayctl-{}", std::process::id());
        let worker = store
            .lease_worker_id(&owner, ADMIN_LEASE_SECONDS)
            .await?
            .ok_or(EngineError::Internal(Fault::NoWorkerNumber))?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.synchronize(&store).await?;
        Ok(Self { store, scope, ids })
    }

    /// Returns the time so many seconds ago, by Postgres' clock.
    #[must_use]
    pub fn time_before_now(&self, seconds: u32) -> DateTime<Utc> {
        self.ids.now() - TimeDelta::seconds(seconds.into())
    }

    /// Returns the reason of a dead letter.
    ///
    /// # Errors
    /// When it is no dead letter.
    pub async fn dead_letter_reason(&self, id: DeliveryId) -> EngineResult<DeadLetterReason> {
        Ok(self.store.dead_letter(self.scope, id).await?.ok_or(EngineError::NotFound(Missing::Delivery))?.reason)
    }

    /// Counts the redrivable dead letters of a filter.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn count_redrivable(&self, query: &DeadLetterQuery) -> EngineResult<DeadLetterCount> {
        count_matching(&self.store, self.scope, query, true).await
    }

    /// Redrives one dead letter. Gateways notice within seconds.
    ///
    /// # Errors
    /// When there is no such letter, or it cannot be sent again.
    pub async fn redrive_one(&self, id: DeliveryId) -> EngineResult<(DeliveryId, Seq)> {
        let done = redrive_one(&self.store, self.scope, id, self.ids.now()).await?;
        Ok((done.fresh, done.seq))
    }

    /// Begins a redrive by filter, for the workers to do.
    ///
    /// # Errors
    /// When a field or the rate makes no sense.
    pub async fn redrive_all(&self, query: &DeadLetterQuery, rate: Option<i32>) -> EngineResult<Redrive> {
        begin_redrive(&self.store, self.scope, query, rate, RedriveId::new(self.ids.next_id()), self.ids.now()).await
    }

    /// Returns the progress of a redrive.
    pub async fn redrive(&self, id: RedriveId) -> EngineResult<Redrive> {
        self.store.redrive(self.scope, id).await?.ok_or(EngineError::NotFound(Missing::Redrive))
    }

    /// Counts the dead letters of a filter, including redriven ones.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn count_all(&self, query: &DeadLetterQuery) -> EngineResult<DeadLetterCount> {
        count_matching(&self.store, self.scope, query, false).await
    }

    /// Purges all dead letters of a filter, and calls `each` with the number so far. Returns their number.
    ///
    /// # Errors
    /// When a field is invalid.
    pub async fn purge(&self, query: &DeadLetterQuery, each: impl FnMut(u64)) -> EngineResult<u64> {
        purge_matching(&self.store, self.scope, query, self.ids.now(), each).await
    }
}

struct RedriveResult {
    fresh: DeliveryId,
    seq: Seq,
    /// True if this call redrove it.
    now: bool,
    recorded: Option<RecordedEvents>,
}

async fn redrive_one(
    store: &Store,
    scope: WorkspaceScope,
    id: DeliveryId,
    at: DateTime<Utc>,
) -> EngineResult<RedriveResult> {
    // Deliveries are settled by seq, which the id does not contain.
    let letter = store.dead_letter(scope, id).await?.ok_or(EngineError::NotFound(Missing::Delivery))?;
    let refused = |why: &str| Err(EngineError::Conflict(Conflict::NotRedrivable(why.to_owned())));
    let (outcome, recorded) = store.redrive_dead_letter(scope, id.agent, letter.seq, at).await?;
    match outcome {
        RedriveOutcome::Redriven { seq, redrive_no, now } => {
            Ok(RedriveResult { fresh: DeliveryId { redrive_no, ..id }, seq, now, recorded })
        }
        RedriveOutcome::NotFound => Err(EngineError::NotFound(Missing::Delivery)),
        RedriveOutcome::Exhausted => refused(&format!("it was sent again {MAX_REDRIVES} times already")),
        RedriveOutcome::MailboxFull => refused("the mailbox is full"),
        RedriveOutcome::AgentDeleted => refused("the agent was deleted"),
        RedriveOutcome::MessageDropped => refused("the message is no longer kept"),
    }
}

async fn purge_matching(
    store: &Store,
    scope: WorkspaceScope,
    query: &DeadLetterQuery,
    now: DateTime<Utc>,
    mut each: impl FnMut(u64),
) -> EngineResult<u64> {
    let mut filter = resolve_filter(store, scope, query).await?;
    // Letters that arrive during the purge stay.
    filter.until = Some(filter.until.map_or(now, |until| until.min(now)));
    let mut purged = 0;
    loop {
        let some = store.purge_dead_letters(scope, &filter, now, PURGE_BATCH).await?;
        purged += some;
        each(purged);
        if some < PURGE_BATCH.unsigned_abs() {
            return Ok(purged);
        }
    }
}

async fn count_matching(
    store: &Store,
    scope: WorkspaceScope,
    query: &DeadLetterQuery,
    redrivable: bool,
) -> EngineResult<DeadLetterCount> {
    let filter = resolve_filter(store, scope, query).await?;
    let by_reason = store.count_dead_letters(scope, &filter, redrivable).await?;
    Ok(DeadLetterCount { total: by_reason.iter().map(|(_, count)| count).sum(), by_reason })
}

async fn begin_redrive(
    store: &Store,
    scope: WorkspaceScope,
    query: &DeadLetterQuery,
    rate: Option<i32>,
    id: RedriveId,
    at: DateTime<Utc>,
) -> EngineResult<Redrive> {
    let (usual, most) = REDRIVE_RATE;
    let rate = rate.unwrap_or(usual);
    if !(1..=most).contains(&rate) {
        return Err(EngineError::invalid_request(format!("rate must be 1 to {most} a second")));
    }
    let filter = resolve_filter(store, scope, query).await?;
    let counted = store.count_dead_letters(scope, &filter, true).await?;
    let matched = counted.iter().map(|(_, count)| count).sum();
    Ok(store.begin_redrive(scope, &NewRedrive { id, filter: &filter, rate, matched }, at).await?)
}

async fn resolve_filter(
    store: &Store,
    scope: WorkspaceScope,
    query: &DeadLetterQuery,
) -> EngineResult<DeadLetterFilter> {
    if let Some(reason) = query.reason.as_deref().filter(|reason| DeadLetterReason::parse(reason).is_none()) {
        let known = DeadLetterReason::ALL.iter().copied().map(DeadLetterReason::as_str).collect::<Vec<_>>().join(", ");
        return Err(EngineError::invalid_request(format!("reason must be one of {known}, not \"{reason}\"")));
    }
    let agent = match &query.agent {
        None => None,
        Some(text) => match (store.agent_by_name(scope, text).await?, text.parse::<AgentId>()) {
            (Some(agent), _) => Some(agent.id),
            // The id may be of a deleted agent.
            (None, Ok(id)) => Some(id),
            (None, Err(_)) => return Err(EngineError::NotFound(Missing::Agent(text.clone()))),
        },
    };
    let node = match &query.node {
        None => None,
        // A direct node has no row; its id is enough.
        Some(text) => {
            Some(store.node(scope, text).await?.map_or_else(|| text.clone(), |row| row.node_id.as_str().to_owned()))
        }
    };
    Ok(DeadLetterFilter { agent, node, reason: query.reason.clone(), from: query.from, until: query.until })
}
