//! Creation of invocations: [`Store::invoke`] checks limits and keys, places and writes a batch in one transaction.
//! Input is [`NewInvocation`], the result of each is an [`InvokeOutcome`]. Called by the engine's invocation queue.

use std::collections::HashMap;

use const_format::formatcp;
use relay_domain::{
    AgentId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    actions::{self, Invocation, InvocationStatus, PlacementRecord},
    events::kind,
};
use relay_wire::{events::recorded_data::ActionInvoked, field::ToValue as _};

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IdempotencyKey, InvocationRecord, claim_key},
    actions::{
        candidates::{Candidates, OpenCount, PlacementQuery},
        invocations::{COLUMNS, decode_invocations},
        invoke_rows::{InvocationColumns, InvocationStart},
        new_invocation::{Handler, NewInvocation, WaitPolicy},
        placement_turns::wait_for_turns,
    },
    codes::WS,
    connections::DatabaseSession,
    events::{Event, EventColumns, RecordedEvents},
};

/// Provider that an invocation was sent to.
#[derive(Debug, Clone)]
pub struct Dispatch {
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Gateway that holds the provider's socket.
    pub gateway_id: Option<GatewayId>,
    /// Attempt number, starting at 1; 0 if an agent handles it.
    pub attempt: i32,
    /// `true` if the frame contains the caller's identity.
    pub tells_caller: bool,
    /// Handling agent with its name; `None` if the node handles it.
    pub agent: Option<(AgentId, String)>,
}

/// Result of creating one invocation.
#[derive(Debug, Clone)]
pub enum InvokeOutcome {
    /// Created in this status, with a dispatch if a provider is connected.
    Created(InvocationStatus, Option<Dispatch>),
    /// The idempotency key was used before; nothing was created.
    KeyUsed,
    /// Placement in its workspace is locked by another transaction; nothing was created, and the engine retries.
    Busy,
    /// No provider is eligible now, with the reasons for the caller.
    Unavailable(Box<PlacementRecord>),
    /// The handling agent has had no connection for [`actions::HANDLER_LOST_AFTER`].
    HandlerLost,
    /// The queue of the target node is full.
    QueueFull,
    /// The action has its maximum number of open invocations.
    TooManyOfAction,
    /// The workspace has its maximum number of open invocations.
    TooManyOfWorkspace,
}

impl Store {
    /// Creates invocations. Each is created or refused on its own; an error applies to all. Returns the events to
    /// announce as well. A batch for several workspaces skips those whose placement is locked, and reports their
    /// invocations as [`InvokeOutcome::Busy`]; a batch for one workspace waits.
    pub async fn invoke(&self, new: &[NewInvocation]) -> StoreResult<(Vec<InvokeOutcome>, Vec<RecordedEvents>)> {
        let doing = "invoking actions";
        let (mut tx, busy) = self.begin_placing(new.iter().map(|one| one.scope), doing).await?;
        let free: Vec<&NewInvocation> = new.iter().filter(|one| !busy.contains(&one.scope)).collect();
        let (created, recorded) = create_invocations(&mut tx, &free).await?;
        // Not `from_commit`: after any failure of this kind the engine looks the ids up (`find_invocations`).
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let mut created = created.into_iter();
        let outcome = |one: &NewInvocation| if busy.contains(&one.scope) { None } else { created.next() };
        Ok((new.iter().map(outcome).map(|outcome| outcome.unwrap_or(InvokeOutcome::Busy)).collect(), recorded))
    }

    /// Returns those of these invocations that exist, after a [`Store::invoke`] whose commit outcome is unknown. The
    /// placement lock makes this wait for a transaction that is still running, so the answer is final.
    pub async fn find_invocations(&self, new: &[NewInvocation]) -> StoreResult<Vec<Invocation>> {
        let doing = "reading invocations after an unknown commit outcome";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Nothing is written, so that no epoch is required. The turns end with the transaction, which is dropped.
        wait_for_turns(&mut tx, &new.iter().map(|one| one.scope).collect(), None).await?;
        let query = format!(
            "SELECT {COLUMNS} FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, invocation_id)
               JOIN invocations i USING (workspace_id, invocation_id)"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(new.iter().map(|one| one.scope.workspace_id()).collect::<Vec<_>>())
            .bind(new.iter().map(|one| one.id).collect::<Vec<_>>())
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        decode_invocations(&rows)
    }
}

/// Creates the invocations whose workspaces are locked by this transaction.
async fn create_invocations(
    tx: &mut DatabaseSession,
    new: &[&NewInvocation],
) -> StoreResult<(Vec<InvokeOutcome>, Vec<RecordedEvents>)> {
    // Before the limits: a repeated request is answered from its record, even where a new one would be refused.
    let used = claim_keys(tx, new).await?;
    let wanted = new.iter().filter_map(|one| match &one.handler {
        Handler::Node { capability, target, .. } => Some((one.scope, capability.as_str(), target.as_ref())),
        Handler::Agent(_) => None,
    });
    let workspaces = new.iter().map(|one| one.scope.workspace_id()).collect();
    let (mut candidates, open) = Candidates::read_with_open_counts(tx, &workspaces, wanted).await?;
    let mut open = OpenCounts::new(open);
    let hosts = read_hosts(tx, new).await?;
    let mut rows = InvocationColumns::default();
    let mut events = Vec::new();
    let mut outcomes = Vec::with_capacity(new.len());
    let mut refused_keys = Vec::new();
    for (&one, used) in new.iter().zip(used) {
        let outcome = if used {
            InvokeOutcome::KeyUsed
        } else if let Some(refusal) = open.refusal(one) {
            refusal
        } else {
            place_invocation(tx, one, &mut candidates, &hosts, &mut rows).await?
        };
        if matches!(outcome, InvokeOutcome::Created(..)) {
            open.count(one);
            events.push((one.scope, invoked_event(one)));
        } else if let (false, Some(key)) = (used, one.key) {
            // Not a key that was used before, which belongs to the earlier request.
            refused_keys.push((one.scope, key.hash));
        }
        outcomes.push(outcome);
    }
    release_keys(tx, &refused_keys).await?;
    // There is none if the workspaces of the whole batch were busy. The events of a batch share one time.
    let Some(at) = new.first().map(|one| one.at) else { return Ok((outcomes, Vec::new())) };
    let recorded = rows.write(tx, EventColumns::collect(at, events)).await?;
    Ok((outcomes, recorded))
}

/// Places one invocation and adds its row to `rows`.
async fn place_invocation(
    tx: &mut DatabaseSession,
    one: &NewInvocation,
    candidates: &mut Candidates,
    hosts: &HashMap<(WorkspaceId, AgentId), HandlerHost>,
    rows: &mut InvocationColumns,
) -> StoreResult<InvokeOutcome> {
    let (capability, target, provider, only_capacity, wait_policy) = match &one.handler {
        Handler::Agent(agent) => {
            let host = hosts.get(&(one.scope.workspace_id(), *agent));
            // A durable outcome reaches its caller whenever the handler returns, so it may wait.
            if host.is_some_and(|host| host.lost) && !one.durable {
                return Ok(InvokeOutcome::HandlerLost);
            }
            // Without a connection the invocation is created nevertheless: the gateway to which the agent returns
            // finds it unsent.
            let dispatch = host.and_then(HandlerHost::dispatch);
            rows.push(one, &InvocationStart { status: InvocationStatus::Invoked, chosen: None, record: None });
            return Ok(InvokeOutcome::Created(InvocationStatus::Invoked, dispatch));
        }
        Handler::Node { capability, target, provider, only_capacity, wait_policy } => {
            (capability, target.as_ref(), provider.as_ref(), *only_capacity, *wait_policy)
        }
    };
    let wanted = PlacementQuery {
        scope: one.scope,
        capability,
        target,
        provider,
        only_capacity,
        avoided: &[],
        attempt: 1,
        entropy: one.entropy,
    };
    let placed = candidates.place(&wanted, one.at);
    if let Some(chosen) = placed.chosen {
        let dispatch = Dispatch {
            node_id: chosen.node_id.clone(),
            provider: chosen.provider.clone(),
            gateway_id: chosen.gateway_id,
            attempt: 1,
            tells_caller: chosen.tells_caller,
            agent: None,
        };
        let record = Some(placed.record);
        rows.push(one, &InvocationStart { status: InvocationStatus::Dispatched, chosen: Some(&chosen), record });
        return Ok(InvokeOutcome::Created(InvocationStatus::Dispatched, Some(dispatch)));
    }
    let waits = match wait_policy {
        WaitPolicy::Never => false,
        WaitPolicy::AsDeclared => placed.may_queue,
        WaitPolicy::Always => true,
    };
    // Only an unavailable node has a queue. A full one refuses at once, and so does a choice among all nodes.
    let Some(target) = target.filter(|_| waits && !placed.full) else {
        return Ok(InvokeOutcome::Unavailable(Box::new(placed.record)));
    };
    // The placement lock makes the count exact: no other transaction adds to the queue before this commit.
    let stored = count_waiting(tx, one.scope, target, provider).await?;
    if stored + rows.waiting_for(one.scope, target, provider) >= actions::OFFLINE_QUEUE {
        return Ok(InvokeOutcome::QueueFull);
    }
    let record = Some(placed.record);
    rows.push(one, &InvocationStart { status: InvocationStatus::Pending, chosen: None, record });
    Ok(InvokeOutcome::Created(InvocationStatus::Pending, None))
}

/// Counts the queued invocations for one provider of a node, or for any provider of the node.
async fn count_waiting(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: Option<&ProviderName>,
) -> StoreResult<i64> {
    sqlx::query_scalar(
        "SELECT count(*) FROM invocations
          WHERE workspace_id = $1 AND target_node_id = $2 AND status = 'pending'
            AND target_provider IS NOT DISTINCT FROM $3",
    )
    .bind(scope.workspace_id())
    .bind(node)
    .bind(provider)
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx("counting queued invocations of a node"))
}

/// Open invocations by workspace, and by workspace and action.
struct OpenCounts {
    counts: HashMap<(WorkspaceId, String), i64>,
    totals: HashMap<WorkspaceId, i64>,
}

impl OpenCounts {
    fn new(open: Vec<OpenCount>) -> Self {
        let mut totals = HashMap::new();
        for count in &open {
            *totals.entry(count.workspace_id).or_insert(0) += count.open;
        }
        let counts = open.into_iter().map(|count| ((count.workspace_id, count.action_name), count.open)).collect();
        Self { counts, totals }
    }

    fn refusal(&self, one: &NewInvocation) -> Option<InvokeOutcome> {
        let workspace = one.scope.workspace_id();
        if self.totals.get(&workspace).is_some_and(|open| *open >= actions::MAX_OPEN_PER_WORKSPACE) {
            return Some(InvokeOutcome::TooManyOfWorkspace);
        }
        let key = (workspace, one.action_name.clone());
        let full = self.counts.get(&key).is_some_and(|open| *open >= actions::MAX_OPEN_PER_ACTION);
        full.then_some(InvokeOutcome::TooManyOfAction)
    }

    fn count(&mut self, one: &NewInvocation) {
        let workspace = one.scope.workspace_id();
        *self.totals.entry(workspace).or_insert(0) += 1;
        *self.counts.entry((workspace, one.action_name.clone())).or_insert(0) += 1;
    }
}

/// Location of a handling agent.
#[derive(sqlx::FromRow)]
struct HandlerHost {
    workspace_id: WorkspaceId,
    agent_id: AgentId,
    name: String,
    node_id: NodeId,
    provider: Option<ProviderName>,
    gateway_id: Option<GatewayId>,
    /// `true` if its node had a connection once, or a token for one, and has none for [`actions::HANDLER_LOST_AFTER`].
    lost: bool,
}

impl HandlerHost {
    fn dispatch(&self) -> Option<Dispatch> {
        Some(Dispatch {
            node_id: self.node_id.clone(),
            provider: self.provider.clone()?,
            gateway_id: Some(self.gateway_id?),
            attempt: 0,
            tells_caller: false,
            agent: Some((self.agent_id, self.name.clone())),
        })
    }
}

// A direct node has a row from its first token on. An agent without one was never connected and may handle its
// invocations over REST, as it reads of them from a subscription; one that had another node before was returned from
// it, and has lost that connection. The age of the row is the time that the first connection may take.
const HOSTS: &str = formatcp!(
    "SELECT DISTINCT ON (a.workspace_id, a.agent_id)
            a.workspace_id, a.agent_id, a.name, a.node_id, p.provider, p.gateway_id,
            p.gateway_id IS NULL AND (EXISTS (
                SELECT FROM nodes n
                 WHERE n.workspace_id = a.workspace_id AND n.node_id = a.node_id AND n.kind = '{WS}'
                   AND n.created_at < relay_now() - make_interval(secs => $3))
             OR a.binding_id IS NULL AND coalesce(a.session_node_id <> a.node_id, false)
                AND a.last_seen_at < relay_now() - make_interval(secs => $3)
                AND NOT EXISTS (
                SELECT FROM nodes n WHERE n.workspace_id = a.workspace_id AND n.node_id = a.node_id))
            AND NOT EXISTS (
                SELECT FROM providers o
                 WHERE o.workspace_id = a.workspace_id AND o.node_id = a.node_id
                   AND (a.provider IS NULL OR o.provider = a.provider)
                   AND coalesce(o.disconnected_at, o.last_heartbeat_at) > relay_now() - make_interval(secs => $3))
            AS lost
       FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
       JOIN agents a USING (workspace_id, agent_id)
       LEFT JOIN providers p ON p.workspace_id = a.workspace_id AND p.node_id = a.node_id
            AND (a.provider IS NULL OR p.provider = a.provider) AND p.gateway_id IS NOT NULL
      ORDER BY a.workspace_id, a.agent_id, p.registered_at"
);

/// Reads the locations of the agents that handle these invocations. An unassigned agent gets the provider of its node
/// that registered first.
async fn read_hosts(
    tx: &mut DatabaseSession,
    new: &[&NewInvocation],
) -> StoreResult<HashMap<(WorkspaceId, AgentId), HandlerHost>> {
    let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) = new
        .iter()
        .filter_map(|one| match one.handler {
            Handler::Agent(agent) => Some((one.scope.workspace_id(), agent)),
            Handler::Node { .. } => None,
        })
        .unzip();
    // Saves a round trip, for which other placements of the workspace would wait.
    if agents.is_empty() {
        return Ok(HashMap::new());
    }
    let hosts: Vec<HandlerHost> = sqlx::query_as(HOSTS)
        .bind(workspaces)
        .bind(agents)
        .bind(actions::HANDLER_LOST_AFTER.as_secs_f64())
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading the locations of handlers"))?;
    Ok(hosts.into_iter().map(|host| ((host.workspace_id, host.agent_id), host)).collect())
}

fn invoked_event(one: &NewInvocation) -> Event {
    // Typed clients require a string, so it is empty if a node handles the invocation.
    let handler = match one.handler {
        Handler::Agent(agent) => agent.to_string(),
        Handler::Node { .. } => String::new(),
    };
    let data = ActionInvoked {
        invocation_id: one.id,
        action_name: &one.action_name,
        caller_name: &one.caller.name,
        handler_agent_id: handler,
    };
    let event = Event::new(kind::ACTION_INVOKED, data.to_value());
    match one.caller.agent_id {
        Some(agent) => event.by_agent(agent),
        None => event,
    }
}

/// Claims the idempotency keys of these invocations. Returns for each whether its key was used before.
pub(crate) async fn claim_keys(tx: &mut DatabaseSession, new: &[&NewInvocation]) -> StoreResult<Vec<bool>> {
    let mut keyed: Vec<(usize, WorkspaceId, IdempotencyKey)> =
        new.iter().enumerate().filter_map(|(nth, one)| Some((nth, one.scope.workspace_id(), one.key?))).collect();
    // One order for all transactions: concurrent batches with the same keys wait instead of deadlocking.
    keyed.sort_unstable_by_key(|(_, workspace, key)| (*workspace, key.hash));
    let mut used = vec![false; new.len()];
    for (nth, workspace, key) in keyed {
        let record = InvocationRecord { invocation_id: new[nth].id };
        used[nth] = !claim_key(tx, workspace, &key, &record).await?;
    }
    Ok(used)
}

/// Releases the keys of refused invocations: a repeated request may succeed.
async fn release_keys(tx: &mut DatabaseSession, keys: &[(WorkspaceScope, [u8; 32])]) -> StoreResult<()> {
    for (scope, hash) in keys {
        sqlx::query("DELETE FROM idempotency_keys WHERE workspace_id = $1 AND key_hash = $2")
            .bind(scope.workspace_id())
            .bind(&hash[..])
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx("releasing the idempotency key of an invocation"))?;
    }
    Ok(())
}
