//! Who could take an invocation, and the choice among them within a transaction.
//!
//! Placements of one workspace wait for each other, so that what one has reserved the next one sees: no provider is
//! given more than it takes.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use relay_domain::{
    GatewayId, NodeId, ProviderName, WorkspaceScope, action,
    node::NODE_TTL,
    placement::{Candidate, Decision, Request, Skip, Target, place},
};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// Nodes that were passed over and are named in a stored decision; of more only the number is kept.
const NAMED_SKIPS: usize = 50;

/// A provider with a capability, as of now.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct Able {
    workspace_id: i64,
    name: String,
    pub(crate) node_id: String,
    node_name: String,
    pub(crate) provider: String,
    kind: String,
    pub(crate) queue: bool,
    pub(crate) tells_caller: bool,
    gateway_id: Option<i64>,
    live: bool,
    draining: bool,
    handlers_live: bool,
    active: i32,
    reserved: i64,
    max_agents: i32,
    load: f64,
    load_measured: bool,
}

impl Able {
    /// The gateway with its socket.
    pub(crate) fn gateway(&self) -> Option<GatewayId> {
        self.gateway_id.map(GatewayId::new)
    }

    /// Whether it is what is wanted, and not only called the same.
    fn is_capable(&self, wanted: &Wanted<'_>) -> bool {
        !wanted.only_capacity || self.kind == "capacity"
    }

    /// Whether doing it takes a place among the provider's agents. Ending an agent takes none, however full it is.
    pub(crate) fn takes_place(&self) -> bool {
        self.kind == "capacity" && self.name != action::RELEASE
    }

    fn candidate(&self, wanted: &Wanted<'_>) -> Candidate {
        let number = |n: i64| u32::try_from(n.max(0)).unwrap_or(u32::MAX);
        Candidate {
            node_id: self.node_id.clone(),
            provider_id: Some(self.provider.clone()),
            capable: self.is_capable(wanted),
            live: self.live,
            draining: self.draining,
            handlers_live: self.handlers_live,
            active: number(self.active.into()),
            reserved: number(self.reserved),
            // An action of a node is no agent: what its agents take does not count.
            max: if self.takes_place() { number(self.max_agents.into()) } else { 0 },
            load: self.load_measured.then_some(self.load),
            avoided: wanted.avoided.contains(&self.node_id),
        }
    }
}

/// What is to be placed.
#[derive(Debug, Clone)]
pub(crate) struct Wanted<'a> {
    pub(crate) scope: WorkspaceScope,
    pub(crate) capability: &'a str,
    pub(crate) target: Option<&'a NodeId>,
    /// The only provider of that node that may.
    pub(crate) provider: Option<&'a ProviderName>,
    /// Whether an action of that name will not do.
    pub(crate) only_capacity: bool,
    /// Nodes where it came to nothing before: taken only when there is no other.
    pub(crate) avoided: &'a [String],
    pub(crate) attempt: i32,
    pub(crate) entropy: u64,
}

/// A choice with its reasons.
#[derive(Debug)]
pub(crate) struct Placed {
    /// Who is to do it.
    pub(crate) chosen: Option<Able>,
    /// Whether the only one that may is there and has no room.
    pub(crate) full: bool,
    /// Whether it could wait for its node to come back.
    pub(crate) may_queue: bool,
    /// For whoever asks why.
    pub(crate) reasons: Value,
}

/// Everybody who could take what a transaction has to place.
#[derive(Debug)]
pub(crate) struct Candidates {
    able: Vec<Able>,
}

const ABLE: &str = "
SELECT c.workspace_id, c.name, c.node_id, n.name AS node_name, c.provider, c.kind, c.queue, c.tells_caller,
       g.gateway_id,
       g.gateway_id IS NOT NULL AND p.last_heartbeat_at > now() - make_interval(secs => $3) AS live,
       n.draining_at IS NOT NULL AS draining, p.handlers_live,
       greatest(p.active_agents,
                (SELECT count(*)::int FROM agents a
                  WHERE a.workspace_id = c.workspace_id AND a.node_id = c.node_id AND a.provider = c.provider
                    AND a.deleted_at IS NULL AND a.status <> 'offline')) AS active,
       (SELECT count(*) FROM invocations i
         WHERE i.workspace_id = c.workspace_id AND i.node_id = c.node_id AND i.provider = c.provider
           AND i.status = 'dispatched' AND i.reserves) AS reserved,
       p.max_agents, p.load, p.load_measured
  FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, name)) AS k
  JOIN node_capabilities c USING (workspace_id, name)
  JOIN providers p USING (workspace_id, node_id, provider)
  JOIN nodes n USING (workspace_id, node_id)
  LEFT JOIN gateways g ON g.gateway_id = p.gateway_id AND g.lease_until > now()
 ORDER BY c.workspace_id, c.name, c.node_id, c.provider";

/// Takes the turns of those workspaces in which no other placement is under way, without waiting; those of the others
/// come back. Of a single workspace it waits for the turn: nobody else is held up by that.
pub(crate) async fn take_free_turns(
    tx: &mut PgConnection,
    scopes: impl Iterator<Item = WorkspaceScope>,
) -> StoreResult<BTreeSet<WorkspaceScope>> {
    let mut scopes: BTreeSet<WorkspaceScope> = scopes.collect();
    if scopes.len() <= 1 {
        take_turns(tx, &scopes.into_iter().collect::<Vec<_>>()).await?;
        return Ok(BTreeSet::new());
    }
    let workspaces: Vec<i64> = scopes.iter().map(|scope| scope.workspace_id().get()).collect();
    let free: Vec<i64> = sqlx::query_scalar(
        "SELECT w FROM unnest($1::bigint[]) AS w WHERE pg_try_advisory_xact_lock(hashtextextended('placement', w))",
    )
    .bind(workspaces)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("taking the turns of placements"))?;
    scopes.retain(|scope| !free.contains(&scope.workspace_id().get()));
    Ok(scopes)
}

/// Waits until no other placement of these workspaces is under way; the statement after it sees what they did.
pub(crate) async fn take_turns(tx: &mut PgConnection, scopes: &[WorkspaceScope]) -> StoreResult<()> {
    let mut workspaces: Vec<i64> = scopes.iter().map(|scope| scope.workspace_id().get()).collect();
    workspaces.sort_unstable();
    workspaces.dedup();
    for workspace in workspaces {
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('placement', $1))")
            .bind(workspace)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx("waiting for other placements"))?;
    }
    Ok(())
}

impl Candidates {
    /// Reads who has these capabilities. Call [`take_turns`] first.
    pub(crate) async fn read<'a>(
        tx: &mut PgConnection,
        wanted: impl Iterator<Item = (WorkspaceScope, &'a str)>,
    ) -> StoreResult<Self> {
        let (workspaces, names): (Vec<i64>, Vec<&str>) =
            wanted.map(|(scope, capability)| (scope.workspace_id().get(), capability)).unzip();
        if workspaces.is_empty() {
            return Ok(Self { able: Vec::new() });
        }
        let able = sqlx::query_as(ABLE)
            .bind(workspaces)
            .bind(names)
            .bind(NODE_TTL.as_secs_f64())
            .fetch_all(tx)
            .await
            .map_err(StoreError::from_sqlx("reading who could take an invocation"))?;
        Ok(Self { able })
    }

    /// Chooses, and counts the choice against whom it fell upon.
    pub(crate) fn place(&mut self, wanted: &Wanted<'_>, at: DateTime<Utc>) -> Placed {
        let workspace = wanted.scope.workspace_id().get();
        let these: Vec<usize> = (0..self.able.len())
            .filter(|&i| self.able[i].workspace_id == workspace && self.able[i].name == wanted.capability)
            .collect();
        let candidates: Vec<Candidate> = these.iter().map(|&i| self.able[i].candidate(wanted)).collect();
        let target = match (wanted.target, wanted.provider) {
            (Some(node), Some(provider)) => Target::Provider(node.to_string(), provider.to_string()),
            (Some(node), None) => Target::Node(node.to_string()),
            (None, _) => Target::Any,
        };
        let request = Request { target };
        let decision = place(&candidates, &request, wanted.entropy);
        let chosen = decision.chosen.and_then(|nth| these.get(nth).copied());
        let reasons = self.reasons(wanted, &these, &decision, at);
        let of_target = |able: &Able| {
            able.is_capable(wanted)
                && wanted.target.is_none_or(|node| node.as_str() == able.node_id)
                && wanted.provider.is_none_or(|provider| provider.as_str() == able.provider)
        };
        let may_queue = these.iter().any(|&i| of_target(&self.able[i]) && self.able[i].queue);
        let full = chosen.is_none() && decision.skipped.iter().any(|(_, skip)| matches!(skip, Skip::Full));
        let chosen = chosen.map(|i| {
            let able = self.able[i].clone();
            if able.takes_place() {
                // The same provider may be there for another capability, too.
                let same = |a: &&mut Able| {
                    a.workspace_id == workspace && a.node_id == able.node_id && a.provider == able.provider
                };
                self.able.iter_mut().filter(same).for_each(|a| a.reserved += 1);
            }
            able
        });
        Placed { chosen, full, may_queue, reasons }
    }

    fn reasons(&self, wanted: &Wanted<'_>, these: &[usize], decision: &Decision, at: DateTime<Utc>) -> Value {
        let chosen = decision.chosen.and_then(|nth| these.get(nth)).map(|&i| &self.able[i]);
        let name_of = |id: &str| {
            these.iter().map(|&i| &self.able[i]).find(|able| able.node_id == id).map(|able| able.node_name.as_str())
        };
        let skipped: Vec<Value> = decision
            .skipped
            .iter()
            .take(NAMED_SKIPS)
            .map(|(id, skip)| json!({ "node_id": id, "node": name_of(id), "reason": skip.as_str() }))
            .collect();
        json!({
            "attempt": wanted.attempt,
            "at": at.timestamp_millis(),
            "capability": wanted.capability,
            "target": wanted.target,
            "chosen": chosen.map(|able| json!({
                "node_id": able.node_id, "node": able.node_name, "provider": able.provider,
                "active": able.active, "reserved": able.reserved, "max_agents": able.max_agents,
                "load": able.load_measured.then_some(able.load),
            })),
            "candidates": these.len(),
            "skipped": skipped,
            "skipped_unnamed": decision.skipped.len().saturating_sub(NAMED_SKIPS),
        })
    }
}
