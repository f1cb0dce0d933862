//! Dead letters: looked at, counted, sent again, put away.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, DeliveryId, MessageId, WorkspaceId, WorkspaceScope,
    dead_letter::{DeadReason, MAX_REDRIVES, REDRIVE_RATE},
    metric_names,
};
pub use relay_store::{
    dead_letters::{LetterFilter, LetterRow},
    redrives::{RedriveRow, Redriven},
};

use relay_store::{Store, events::Recorded};

use crate::{Engine, EngineError, EngineResult, IdSource};

/// Default and most of a list of dead letters.
pub const PAGE: (i64, i64) = (100, 200);
/// Letters that one statement of a purge puts away.
const PURGED_AT_ONCE: i64 = 5000;
/// How much of a redrive one step does: its rate's worth of this long.
const STEP: TimeDelta = TimeDelta::milliseconds(250);
/// How long a terminal may take; its ids need a worker number.
const DESK_LEASE_SECONDS: i32 = 60;
/// Steps that one tick takes before others have a turn.
const STEPS_PER_TICK: usize = 20;

/// Letters that a filter asks for, as callers say it.
#[derive(Debug, Clone, Default)]
pub struct LetterQuery {
    /// An agent, by name or id.
    pub agent: Option<String>,
    /// A node, by name or id.
    pub node: Option<String>,
    /// Why they were given up.
    pub reason: Option<String>,
    /// Given up at this time or later.
    pub from: Option<DateTime<Utc>>,
    /// Given up before this time.
    pub until: Option<DateTime<Utc>>,
}

/// How many letters there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LetterCount {
    /// In all.
    pub total: i64,
    /// By reason; reasons without letters are left out.
    pub by_reason: Vec<(String, i64)>,
}

impl Engine {
    /// Dead letters, the youngest first, behind the one that `before` names.
    ///
    /// # Errors
    /// When a field makes no sense, or `before` is no dead letter.
    pub async fn dead_letters(
        &self,
        scope: WorkspaceScope,
        query: &LetterQuery,
        before: Option<DeliveryId>,
        limit: i64,
    ) -> EngineResult<Vec<LetterRow>> {
        let filter = filter(self.store(), scope, query).await?;
        let before = match before {
            Some(id) => Some(self.dead_letter(scope, id).await?),
            None => None,
        };
        Ok(self.store().dead_letters(scope, &filter, before.as_ref(), limit).await?)
    }

    /// A dead letter.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn dead_letter(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<LetterRow> {
        self.store().dead_letter(scope, id).await?.ok_or(EngineError::DeliveryNotFound)
    }

    /// How many dead letters there are; with `redrivable` only those that were not sent again.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn count_dead_letters(
        &self,
        scope: WorkspaceScope,
        query: &LetterQuery,
        redrivable: bool,
    ) -> EngineResult<LetterCount> {
        count(self.store(), scope, query, redrivable).await
    }

    /// Sends one dead letter again, and names the delivery that it is now. Repeating it changes nothing.
    ///
    /// # Errors
    /// When there is no such letter, or it cannot be sent again.
    pub async fn redrive_one(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<(DeliveryId, i64)> {
        let done = redrive_one(self.store(), scope, id, self.now()).await?;
        if done.now {
            metrics::counter!(metric_names::DELIVERIES_REDRIVEN).increment(1);
            self.hints().redriven(&[(scope, id.agent)]);
        }
        if let Some(recorded) = done.recorded {
            self.announce(recorded);
        }
        Ok((done.fresh, done.seq))
    }

    /// Begins to send all dead letters of a filter again, `rate` a second. Workers do it; letters that were sent
    /// again before are left out, so repeating it sends nothing twice.
    ///
    /// # Errors
    /// When a field or the rate makes no sense.
    pub async fn redrive_all(
        &self,
        scope: WorkspaceScope,
        query: &LetterQuery,
        rate: Option<i32>,
    ) -> EngineResult<RedriveRow> {
        begin(self.store(), scope, query, rate, self.next_id(), self.now()).await
    }

    /// How far a redrive is.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn redrive(&self, scope: WorkspaceScope, id: MessageId) -> EngineResult<RedriveRow> {
        self.store().redrive(scope, id.get()).await?.ok_or(EngineError::RedriveNotFound)
    }

    /// Puts all dead letters of a filter out of sight. Returns how many.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn purge_dead_letters(&self, scope: WorkspaceScope, query: &LetterQuery) -> EngineResult<u64> {
        purge(self.store(), scope, query, self.now(), |_| {}).await
    }

    /// Puts one dead letter out of sight.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn purge_dead_letter(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<()> {
        let letter = self.dead_letter(scope, id).await?;
        let agent = AgentId::new(letter.agent_id);
        let done = self.store().purge_dead_letter(scope, agent, letter.seq, self.now()).await?;
        if done { Ok(()) } else { Err(EngineError::DeliveryNotFound) }
    }

    /// Steps redrives that are due. How many letters were sent again, whether more are due, and how late it was.
    pub(crate) async fn step_redrives(&self) -> EngineResult<(u64, bool, Duration)> {
        let (mut redriven, mut late) = (0, 0.0_f64);
        for _ in 0..STEPS_PER_TICK {
            let Some(step) = self.store().redrive_step(STEP, self.now()).await? else {
                return Ok((redriven, false, Duration::from_secs_f64(late)));
            };
            late = late.max(step.late_seconds);
            redriven += step.redriven;
            metrics::counter!(metric_names::DELIVERIES_REDRIVEN).increment(step.redriven);
            let mailboxes: Vec<_> = step.mailboxes.iter().map(|agent| (step.scope, *agent)).collect();
            self.hints().redriven(&mailboxes);
            if let Some(recorded) = step.recorded {
                self.announce(recorded);
            }
        }
        Ok((redriven, true, Duration::from_secs_f64(late)))
    }
}

/// Dead letters for an operator at a terminal: on the database alone, without an engine of its own.
pub struct Desk {
    store: Store,
    scope: WorkspaceScope,
    ids: IdSource,
}

impl Desk {
    /// Opens the database.
    ///
    /// # Errors
    /// When it does not answer, or there is no such workspace.
    pub async fn open(database_url: &str, workspace: WorkspaceId) -> EngineResult<Self> {
        let store = Store::connect(database_url, 1)?;
        let scope = WorkspaceScope::from_engine_row(workspace);
        store.workspace(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        let owner = format!("relayctl-{}", std::process::id());
        let worker = store.lease_worker_id(&owner, DESK_LEASE_SECONDS).await?.ok_or(EngineError::NoWorkerNumber)?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.correct(&store).await?;
        Ok(Self { store, scope, ids })
    }

    /// As many seconds ago.
    #[must_use]
    pub fn ago(&self, seconds: u32) -> DateTime<Utc> {
        self.now() - TimeDelta::seconds(seconds.into())
    }

    /// Why a delivery was given up.
    ///
    /// # Errors
    /// When it is no dead letter.
    pub async fn reason_of(&self, id: DeliveryId) -> EngineResult<String> {
        Ok(self.store.dead_letter(self.scope, id).await?.ok_or(EngineError::DeliveryNotFound)?.reason)
    }

    /// How many letters of a filter can be sent again.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn count(&self, query: &LetterQuery) -> EngineResult<LetterCount> {
        count(&self.store, self.scope, query, true).await
    }

    /// Sends one letter again. Gateways notice within seconds.
    ///
    /// # Errors
    /// When there is no such letter, or it cannot be sent again.
    pub async fn redrive_one(&self, id: DeliveryId) -> EngineResult<(DeliveryId, i64)> {
        let done = redrive_one(&self.store, self.scope, id, self.now()).await?;
        Ok((done.fresh, done.seq))
    }

    /// Begins a redrive by filter, for the workers to do.
    ///
    /// # Errors
    /// When a field or the rate makes no sense.
    pub async fn redrive_all(&self, query: &LetterQuery, rate: Option<i32>) -> EngineResult<RedriveRow> {
        begin(&self.store, self.scope, query, rate, self.ids.next_id(), self.now()).await
    }

    /// How far a redrive is.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn redrive(&self, id: i64) -> EngineResult<RedriveRow> {
        self.store.redrive(self.scope, id).await?.ok_or(EngineError::RedriveNotFound)
    }

    /// How many letters of a filter there are, those that were sent again included.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn count_all(&self, query: &LetterQuery) -> EngineResult<LetterCount> {
        count(&self.store, self.scope, query, false).await
    }

    /// Puts all dead letters of a filter out of sight, and calls `each` with how many it was so far. Returns how many.
    ///
    /// # Errors
    /// When a field makes no sense.
    pub async fn purge(&self, query: &LetterQuery, each: impl FnMut(u64)) -> EngineResult<u64> {
        purge(&self.store, self.scope, query, self.now(), each).await
    }

    fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(self.ids.now_ms()).unwrap_or_default()
    }
}

struct One {
    fresh: DeliveryId,
    seq: i64,
    /// Whether this call made it.
    now: bool,
    recorded: Option<Recorded>,
}

async fn redrive_one(store: &Store, scope: WorkspaceScope, id: DeliveryId, at: DateTime<Utc>) -> EngineResult<One> {
    let letter = store.dead_letter(scope, id).await?.ok_or(EngineError::DeliveryNotFound)?;
    let refused = |why: &str| Err(EngineError::NotRedrivable(why.to_owned()));
    let (outcome, recorded) = store.redrive_letter(scope, id.agent, letter.seq, at).await?;
    match outcome {
        Redriven::As { seq, redrive_no, now } => Ok(One { fresh: DeliveryId { redrive_no, ..id }, seq, now, recorded }),
        Redriven::NotFound => Err(EngineError::DeliveryNotFound),
        Redriven::Exhausted => refused(&format!("it was sent again {MAX_REDRIVES} times already")),
        Redriven::MailboxFull => refused("the mailbox is full"),
        Redriven::AgentGone => refused("the agent was deleted"),
        Redriven::MessageGone => refused("the message is no longer kept"),
    }
}

async fn purge(
    store: &Store,
    scope: WorkspaceScope,
    query: &LetterQuery,
    now: DateTime<Utc>,
    mut each: impl FnMut(u64),
) -> EngineResult<u64> {
    let mut filter = filter(store, scope, query).await?;
    // What dies meanwhile stays.
    filter.until = Some(filter.until.map_or(now, |until| until.min(now)));
    let mut purged = 0;
    loop {
        let some = store.purge_dead_letters(scope, &filter, now, PURGED_AT_ONCE).await?;
        purged += some;
        each(purged);
        if some < PURGED_AT_ONCE.unsigned_abs() {
            return Ok(purged);
        }
    }
}

async fn count(
    store: &Store,
    scope: WorkspaceScope,
    query: &LetterQuery,
    redrivable: bool,
) -> EngineResult<LetterCount> {
    let filter = filter(store, scope, query).await?;
    let by_reason = store.count_dead_letters(scope, &filter, redrivable).await?;
    Ok(LetterCount { total: by_reason.iter().map(|(_, count)| count).sum(), by_reason })
}

async fn begin(
    store: &Store,
    scope: WorkspaceScope,
    query: &LetterQuery,
    rate: Option<i32>,
    id: i64,
    at: DateTime<Utc>,
) -> EngineResult<RedriveRow> {
    let (usual, most) = REDRIVE_RATE;
    let rate = rate.unwrap_or(usual);
    if !(1..=most).contains(&rate) {
        return Err(EngineError::InvalidRequest(format!("rate must be 1 to {most} a second")));
    }
    let filter = filter(store, scope, query).await?;
    let counted = store.count_dead_letters(scope, &filter, true).await?;
    let matched = counted.iter().map(|(_, count)| count).sum();
    Ok(store.begin_redrive(scope, id, &filter, rate, matched, at).await?)
}

async fn filter(store: &Store, scope: WorkspaceScope, query: &LetterQuery) -> EngineResult<LetterFilter> {
    if let Some(reason) = query.reason.as_deref().filter(|reason| DeadReason::parse(reason).is_none()) {
        let known = DeadReason::ALL.map(DeadReason::as_str).join(", ");
        return Err(EngineError::InvalidRequest(format!("reason must be one of {known}, not \"{reason}\"")));
    }
    let agent = match &query.agent {
        None => None,
        Some(text) => match (store.agent_by_name(scope, text).await?, text.parse::<AgentId>()) {
            (Some(row), _) => Some(row.agent_id),
            // An id may be of an agent that was deleted.
            (None, Ok(id)) => Some(id),
            (None, Err(_)) => return Err(EngineError::AgentNotFound(text.clone())),
        },
    };
    let node = match &query.node {
        None => None,
        // A direct node is in no table; its id says enough.
        Some(text) => {
            Some(store.node(scope, text).await?.map_or_else(|| text.clone(), |row| row.node_id.as_str().to_owned()))
        }
    };
    Ok(LetterFilter { agent, node, reason: query.reason.clone(), from: query.from, until: query.until })
}
