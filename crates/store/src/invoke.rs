//! New invocations: counted, placed and written in one transaction.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, GatewayId, InvocationId, NodeId, ProviderName, WorkspaceScope,
    action::{self, Status},
    event,
};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    candidates::{Candidates, Wanted, take_free_turns, take_turns},
    commit::IDEMPOTENCY_KEPT_HOURS,
    events::{self, NewEvent, Recorded},
    invocations::{COLUMNS, InvocationRow},
    invoke_rows::{Row, Rows},
};

/// Who is to do it.
#[derive(Debug, Clone)]
pub enum Handler {
    /// This agent, wherever it is.
    Agent(AgentId),
    /// A node with the capability.
    Node {
        /// What it must advertise, and what the frame calls the action.
        capability: String,
        /// The only node that may.
        target: Option<NodeId>,
        /// The only provider of that node that may.
        provider: Option<ProviderName>,
        /// Whether only a capacity will do, and no action that a node calls the same.
        only_capacity: bool,
        /// What happens when nobody can right now.
        waits: Waits,
    },
}

/// When an invocation waits for a node that is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// Never: it is refused.
    Never,
    /// When its provider said that its invocations queue.
    AsDeclared,
    /// Always.
    Always,
}

/// Who invokes.
#[derive(Debug, Clone)]
pub struct Invoker {
    /// The agent; none for the holder of the workspace's key.
    pub agent_id: Option<AgentId>,
    /// Its name.
    pub name: String,
}

/// An invocation to be made.
#[derive(Debug, Clone)]
pub struct NewInvocation {
    /// Its tenant.
    pub scope: WorkspaceScope,
    /// Its id. The same one again is the same invocation.
    pub id: InvocationId,
    /// What is invoked.
    pub action_name: String,
    /// Who is to do it.
    pub handler: Handler,
    /// Who invokes it.
    pub caller: Invoker,
    /// What it is given.
    pub input: Value,
    /// Whether its outcome goes into the caller's mailbox.
    pub durable: bool,
    /// What its idempotency key is stored as, with the fingerprint of the request.
    pub key: Option<([u8; 32], [u8; 32])>,
    /// Breaks ties.
    pub entropy: u64,
    /// Now.
    pub at: DateTime<Utc>,
}

/// Where an invocation was sent.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The gateway with its socket.
    pub gateway_id: Option<GatewayId>,
    /// Which try this is.
    pub attempt: i32,
    /// Whether the frame tells who calls.
    pub tells_caller: bool,
    /// The agent on that node that handles it, with its name.
    pub agent: Option<(AgentId, String)>,
}

/// What became of an invocation.
#[derive(Debug, Clone)]
pub enum Invoked {
    /// It is there, under this status, on its way if it has somewhere to go.
    Made(Status, Option<Dispatch>),
    /// Its key was used before: nothing was done.
    KeyUsed,
    /// Others are placing in its workspace: nothing was done, it is to be tried again.
    Busy,
    /// Nobody can do it now. The reasons, for people.
    Unavailable(Value),
    /// As many wait for its node as may.
    QueueFull,
    /// As many of this action are open as may be.
    TooManyOfAction,
    /// As many of this workspace are open as may be.
    TooManyOfWorkspace,
}

impl Store {
    /// Makes invocations. Each of them succeeds or is refused by itself; the error is of all. What to announce comes
    /// with them. Those of one workspace wait for their turn; among those of several nobody waits for a workspace that
    /// is busy.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn invoke(&self, new: &[NewInvocation]) -> StoreResult<(Vec<Invoked>, Vec<Recorded>)> {
        let doing = "invoking actions";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let busy = take_free_turns(&mut tx, new.iter().map(|one| one.scope)).await?;
        let free: Vec<&NewInvocation> = new.iter().filter(|one| !busy.contains(&one.scope)).collect();
        let (made, recorded) = make(&mut tx, &free).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let mut made = made.into_iter();
        let outcome = |one: &NewInvocation| if busy.contains(&one.scope) { None } else { made.next() };
        Ok((new.iter().map(outcome).map(|outcome| outcome.unwrap_or(Invoked::Busy)).collect(), recorded))
    }

    /// Which of these invocations there are, when nobody heard how [`Store::invoke`] ended: whatever it did is done
    /// by the time that this answers.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn invocations_made(&self, new: &[NewInvocation]) -> StoreResult<Vec<InvocationRow>> {
        let doing = "looking which invocations were made";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        take_turns(&mut tx, &new.iter().map(|one| one.scope).collect::<Vec<_>>()).await?;
        let query = format!(
            "SELECT {COLUMNS} FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, invocation_id)
               JOIN invocations i USING (workspace_id, invocation_id)"
        );
        sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(new.iter().map(|one| one.scope.workspace_id().get()).collect::<Vec<_>>())
            .bind(new.iter().map(|one| one.id.get()).collect::<Vec<_>>())
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))
    }
}

/// Makes those whose workspaces' turns were taken.
async fn make(tx: &mut PgConnection, new: &[&NewInvocation]) -> StoreResult<(Vec<Invoked>, Vec<Recorded>)> {
    let used = claim_keys(tx, new).await?;
    let mut open = Open::read(tx, new).await?;
    let wanted = new.iter().filter_map(|one| match &one.handler {
        Handler::Node { capability, .. } => Some((one.scope, capability.as_str())),
        Handler::Agent(_) => None,
    });
    let mut candidates = Candidates::read(tx, wanted).await?;
    let hosts = hosts(tx, new).await?;
    let mut written = Rows::default();
    let mut events = Vec::new();
    let mut outcomes = Vec::with_capacity(new.len());
    let mut refused_keys = Vec::new();
    for (&one, used) in new.iter().zip(used) {
        let outcome = if used {
            Invoked::KeyUsed
        } else if let Some(refusal) = open.refusal(one) {
            refusal
        } else {
            decide(tx, one, &mut candidates, &hosts, &mut written).await?
        };
        if matches!(outcome, Invoked::Made(..)) {
            open.count(one);
            events.push((one.scope, invoked_event(one)));
        } else if let (false, Some((hash, _))) = (used, &one.key) {
            refused_keys.push((one.scope, *hash));
        }
        outcomes.push(outcome);
    }
    written.insert(tx).await?;
    release_keys(tx, &refused_keys).await?;
    let at = new.first().map_or_else(Utc::now, |one| one.at);
    let recorded = events::append_mixed(tx, at, events).await?;
    Ok((outcomes, recorded))
}

/// Finds somebody for one invocation, and queues its row.
async fn decide(
    tx: &mut PgConnection,
    one: &NewInvocation,
    candidates: &mut Candidates,
    hosts: &HashMap<(i64, i64), Host>,
    written: &mut Rows,
) -> StoreResult<Invoked> {
    let (capability, target, provider, only_capacity, waits) = match &one.handler {
        Handler::Agent(agent) => {
            let host = hosts.get(&(one.scope.workspace_id().get(), agent.get()));
            let dispatch = host.and_then(Host::dispatch);
            written.push(one, &Row { status: Status::Invoked, chosen: None, reasons: Value::Array(Vec::new()) });
            return Ok(Invoked::Made(Status::Invoked, dispatch));
        }
        Handler::Node { capability, target, provider, only_capacity, waits } => {
            (capability, target.as_ref(), provider.as_ref(), *only_capacity, *waits)
        }
    };
    let wanted = Wanted {
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
    if let Some(able) = placed.chosen {
        let dispatch = Dispatch {
            node_id: NodeId::new(&able.node_id),
            provider: ProviderName::new(&able.provider),
            gateway_id: able.gateway(),
            attempt: 1,
            tells_caller: able.tells_caller,
            agent: None,
        };
        let reasons = Value::Array(vec![placed.reasons]);
        written.push(one, &Row { status: Status::Dispatched, chosen: Some(&able), reasons });
        return Ok(Invoked::Made(Status::Dispatched, Some(dispatch)));
    }
    let waits = match waits {
        Waits::Never => false,
        Waits::AsDeclared => placed.may_queue,
        Waits::Always => true,
    };
    let Some(target) = target.filter(|_| waits && !placed.full) else {
        return Ok(Invoked::Unavailable(placed.reasons));
    };
    let before = waiting(tx, one.scope, target, provider).await?;
    if before + written.waiting_for(one.scope, target, provider) >= action::OFFLINE_QUEUE {
        return Ok(Invoked::QueueFull);
    }
    let reasons = Value::Array(vec![placed.reasons]);
    written.push(one, &Row { status: Status::Pending, chosen: None, reasons });
    Ok(Invoked::Made(Status::Pending, None))
}

/// How many wait for a provider of a node, or for the node if any of them will do.
async fn waiting(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: Option<&ProviderName>,
) -> StoreResult<i64> {
    sqlx::query_scalar(
        "SELECT count(*) FROM invocations
          WHERE workspace_id = $1 AND target_node_id = $2 AND status = 'pending'
            AND target_provider IS NOT DISTINCT FROM $3",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(provider.map(ProviderName::as_str))
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx("counting what waits for a node"))
}

/// How many invocations are open.
struct Open {
    counts: HashMap<(i64, String), i64>,
    totals: HashMap<i64, i64>,
}

impl Open {
    async fn read(tx: &mut PgConnection, new: &[&NewInvocation]) -> StoreResult<Self> {
        let mut workspaces: Vec<i64> = new.iter().map(|one| one.scope.workspace_id().get()).collect();
        workspaces.sort_unstable();
        workspaces.dedup();
        let rows: Vec<(i64, String, i64)> = sqlx::query_as(
            "SELECT workspace_id, action_name, count(*) FROM invocations
              WHERE completed_at IS NULL AND workspace_id = ANY ($1) GROUP BY workspace_id, action_name",
        )
        .bind(workspaces)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("counting open invocations"))?;
        let mut totals = HashMap::new();
        for (workspace, _, count) in &rows {
            *totals.entry(*workspace).or_insert(0) += count;
        }
        let counts = rows.into_iter().map(|(workspace, name, count)| ((workspace, name), count)).collect();
        Ok(Self { counts, totals })
    }

    fn refusal(&self, one: &NewInvocation) -> Option<Invoked> {
        let workspace = one.scope.workspace_id().get();
        if self.totals.get(&workspace).is_some_and(|open| *open >= action::MAX_OPEN_PER_WORKSPACE) {
            return Some(Invoked::TooManyOfWorkspace);
        }
        let key = (workspace, one.action_name.clone());
        let full = self.counts.get(&key).is_some_and(|open| *open >= action::MAX_OPEN_PER_ACTION);
        full.then_some(Invoked::TooManyOfAction)
    }

    fn count(&mut self, one: &NewInvocation) {
        let workspace = one.scope.workspace_id().get();
        *self.totals.entry(workspace).or_insert(0) += 1;
        *self.counts.entry((workspace, one.action_name.clone())).or_insert(0) += 1;
    }
}

/// Where an agent that handles something is.
#[derive(sqlx::FromRow)]
struct Host {
    workspace_id: i64,
    agent_id: i64,
    name: String,
    node_id: String,
    provider: Option<String>,
    gateway_id: Option<i64>,
}

impl Host {
    fn dispatch(&self) -> Option<Dispatch> {
        Some(Dispatch {
            node_id: NodeId::new(&self.node_id),
            provider: ProviderName::new(self.provider.as_deref()?),
            gateway_id: Some(GatewayId::new(self.gateway_id?)),
            attempt: 0,
            tells_caller: false,
            agent: Some((AgentId::new(self.agent_id), self.name.clone())),
        })
    }
}

/// Where the agents are that handle these.
async fn hosts(tx: &mut PgConnection, new: &[&NewInvocation]) -> StoreResult<HashMap<(i64, i64), Host>> {
    let (workspaces, agents): (Vec<i64>, Vec<i64>) = new
        .iter()
        .filter_map(|one| match one.handler {
            Handler::Agent(agent) => Some((one.scope.workspace_id().get(), agent.get())),
            Handler::Node { .. } => None,
        })
        .unzip();
    if agents.is_empty() {
        return Ok(HashMap::new());
    }
    let hosts: Vec<Host> = sqlx::query_as(
        "SELECT DISTINCT ON (a.workspace_id, a.agent_id)
                a.workspace_id, a.agent_id, a.name, a.node_id, p.provider, p.gateway_id
           FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
           JOIN agents a USING (workspace_id, agent_id)
           LEFT JOIN providers p ON p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                AND (a.provider IS NULL OR p.provider = a.provider) AND p.gateway_id IS NOT NULL
          ORDER BY a.workspace_id, a.agent_id, p.registered_at",
    )
    .bind(workspaces)
    .bind(agents)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("looking where handlers are"))?;
    Ok(hosts.into_iter().map(|host| ((host.workspace_id, host.agent_id), host)).collect())
}

fn invoked_event(one: &NewInvocation) -> NewEvent {
    // Typed clients take a text, so that it is empty where a node handles it.
    let handler = match one.handler {
        Handler::Agent(agent) => agent.to_string(),
        Handler::Node { .. } => String::new(),
    };
    let data = json!({
        "invocation_id": one.id, "action_name": one.action_name, "caller_name": one.caller.name,
        "handler_agent_id": handler,
    });
    let told = NewEvent::new(event::ACTION_INVOKED, data);
    match one.caller.agent_id {
        Some(agent) => told.by(agent),
        None => told,
    }
}

/// Claims the keys of those that have one, in the order of their hashes. Tells for each whether it was used before.
pub(crate) async fn claim_keys(tx: &mut PgConnection, new: &[&NewInvocation]) -> StoreResult<Vec<bool>> {
    let mut keyed: Vec<(usize, i64, [u8; 32], [u8; 32])> = Vec::new();
    for (nth, one) in new.iter().enumerate() {
        if let Some((hash, fingerprint)) = one.key {
            keyed.push((nth, one.scope.workspace_id().get(), hash, fingerprint));
        }
    }
    keyed.sort_unstable_by_key(|(_, workspace, hash, _)| (*workspace, *hash));
    let mut used = vec![false; new.len()];
    for (nth, workspace, hash, fingerprint) in keyed {
        let claimed = sqlx::query(
            "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
             VALUES ($1, $2, $3, 201, $4, now())
             ON CONFLICT (workspace_id, key_hash) DO UPDATE
                SET fingerprint = excluded.fingerprint, status = excluded.status, response = excluded.response,
                    created_at = excluded.created_at
              WHERE k.created_at < now() - make_interval(hours => $5)",
        )
        .bind(workspace)
        .bind(&hash[..])
        .bind(&fingerprint[..])
        .bind(json!({ "invocation_id": new[nth].id.get() }))
        .bind(IDEMPOTENCY_KEPT_HOURS)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("claiming the idempotency key of an invocation"))?;
        used[nth] = claimed.rows_affected() == 0;
    }
    Ok(used)
}

/// Gives the keys of what was refused back: the next try may succeed.
async fn release_keys(tx: &mut PgConnection, keys: &[(WorkspaceScope, [u8; 32])]) -> StoreResult<()> {
    for (scope, hash) in keys {
        sqlx::query("DELETE FROM idempotency_keys WHERE workspace_id = $1 AND key_hash = $2")
            .bind(scope.workspace_id().get())
            .bind(&hash[..])
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx("releasing the idempotency key of an invocation"))?;
    }
    Ok(())
}
