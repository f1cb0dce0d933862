//! Providers that can take an invocation, and the choice among them within a transaction.
//!
//! Placements in one workspace take turns ([`super::placement_turns`]), so each placement sees the reservations of the
//! one before it and no provider exceeds its limit. Called by [`super::invoke`] and [`super::redispatch`].

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    actions::{ChosenProvider, PlacementRecord, RELEASE, SPAWN, SPAWN_PREFIX, SkippedNode},
    nodes::{
        CapabilityKind, NODE_TTL,
        placement::{Candidate, PlacementDecision, PlacementRequest, PlacementTarget, SkipReason, place},
    },
};
use sqlx::{Row as _, postgres::PgRow};

use crate::{StoreError, StoreResult, connections::DatabaseSession, decode::decode_rows};

/// Maximum number of skipped nodes in a record; further ones are only counted, which bounds the row.
const NAMED_SKIPS: usize = 50;

/// Current state of a provider that advertises the requested capability.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct CapableProvider {
    workspace_id: WorkspaceId,
    name: String,
    pub(crate) node_id: NodeId,
    node_name: String,
    pub(crate) provider: ProviderName,
    kind: CapabilityKind,
    pub(crate) queue: bool,
    pub(crate) tells_caller: bool,
    /// `true` if it does not advertise the capability, and is asked because it hosts the agent.
    implied: bool,
    pub(crate) gateway_id: Option<GatewayId>,
    live: bool,
    draining: bool,
    handlers_live: bool,
    active: i32,
    reserved: i64,
    max_agents: i32,
    load: f64,
    load_measured: bool,
}

impl CapableProvider {
    fn key(&self) -> (WorkspaceId, &str, &NodeId, &ProviderName) {
        (self.workspace_id, &self.name, &self.node_id, &self.provider)
    }

    /// Returns whether the kind of the capability satisfies the query. Actions and capacities share one name space.
    fn is_capable(&self, wanted: &PlacementQuery<'_>) -> bool {
        self.name == wanted.capability
            && (!wanted.only_capacity || self.kind == CapabilityKind::Capacity)
            && (!self.implied || wanted.provider == Some(&self.provider))
    }

    /// Returns whether this is an action that is invoked instead of the requested capacity of its node.
    fn is_policy(&self, wanted: &PlacementQuery<'_>) -> bool {
        let covers_spawn = self.name == SPAWN && wanted.capability.starts_with(SPAWN_PREFIX);
        self.kind == CapabilityKind::Action && (self.name == wanted.capability || covers_spawn)
    }

    /// Returns whether the invocation occupies one of the provider's agent slots. Releasing an agent needs none, so it
    /// works on a full provider.
    pub(crate) fn occupies_slot(&self) -> bool {
        self.kind == CapabilityKind::Capacity && self.name != RELEASE
    }

    fn candidate(&self, wanted: &PlacementQuery<'_>, has_policy: bool) -> Candidate {
        // The numbers are only compared, so one that is out of range may be clamped.
        let number = |n: i64| u32::try_from(n.max(0)).unwrap_or(u32::MAX);
        Candidate {
            node_id: self.node_id.clone(),
            provider_id: Some(self.provider.clone()),
            capable: self.is_capable(wanted) && !(has_policy && self.kind == CapabilityKind::Capacity),
            live: self.live,
            draining: self.draining,
            handlers_live: self.handlers_live,
            active: number(self.active.into()),
            reserved: number(self.reserved),
            // An action starts no agent, so the agent limit does not apply to it.
            max: if self.occupies_slot() { number(self.max_agents.into()) } else { 0 },
            load: self.load_measured.then_some(self.load),
            avoided: wanted.avoided.contains(&self.node_id),
        }
    }
}

/// One invocation to place.
#[derive(Debug, Clone)]
pub(crate) struct PlacementQuery<'a> {
    pub(crate) scope: WorkspaceScope,
    pub(crate) capability: &'a str,
    pub(crate) target: Option<&'a NodeId>,
    /// Restricts the choice to this provider of the target node.
    pub(crate) provider: Option<&'a ProviderName>,
    /// Excludes actions with the same name as the capacity. Together with a target it is the capacity of that very
    /// node, and is also used where a policy exists: the policy itself asks for it.
    pub(crate) only_capacity: bool,
    /// Nodes of earlier attempts; chosen only if no other node is eligible.
    pub(crate) avoided: &'a [NodeId],
    pub(crate) attempt: i32,
    pub(crate) entropy: u64,
}

/// Chosen provider, with the reasons that are stored with the invocation.
#[derive(Debug)]
pub(crate) struct Placement {
    pub(crate) chosen: Option<CapableProvider>,
    /// `true` if no provider was chosen and at least one was skipped because it is full.
    pub(crate) full: bool,
    /// `true` if a matching provider declared that its invocations queue while it is offline.
    pub(crate) may_queue: bool,
    /// Explanation for operators and callers.
    pub(crate) record: PlacementRecord,
}

/// Providers with any of the capabilities that a transaction places, including the reservations that it has made so
/// far.
#[derive(Debug)]
pub(crate) struct Candidates {
    providers: Vec<CapableProvider>,
}

// Selects the providers with the capabilities `c`. A node is the first in the order of its key: on a table without
// statistics a plan would look for it among all nodes of its workspace.
// The larger of two counts of agents applies: the provider's own is as old as its last heartbeat, and only it includes
// agents that the engine does not know. A provider is not live without a valid lease of its gateway, whatever its row
// says.
macro_rules! capable_providers {
    ($c:literal) => {
        concat!(
            "
SELECT c.workspace_id, c.name, c.node_id, n.name AS node_name, c.provider, c.kind, c.queue, c.tells_caller,
       c.implied, g.gateway_id,
       g.gateway_id IS NOT NULL AND p.last_heartbeat_at > relay_now() - make_interval(secs => $3) AS live,
       n.draining_at IS NOT NULL AS draining, p.handlers_live OR c.implied AS handlers_live,
       greatest(p.active_agents,
                (SELECT count(*)::int FROM agents a
                  WHERE a.workspace_id = c.workspace_id AND a.node_id = c.node_id AND a.provider = c.provider
                    AND a.deleted_at IS NULL AND a.status <> 'offline')) AS active,
       (SELECT count(*) FROM invocations i
         WHERE i.workspace_id = c.workspace_id AND i.node_id = c.node_id AND i.provider = c.provider
           AND i.status = 'dispatched' AND i.reserves) AS reserved,
       p.max_agents, p.load, p.load_measured, NULL::bigint AS open
  FROM (",
            $c,
            ") AS c
  JOIN providers p USING (workspace_id, node_id, provider)
  CROSS JOIN LATERAL (
       SELECT m.node_id, m.name, m.draining_at FROM nodes m
        WHERE m.workspace_id = c.workspace_id AND m.node_id >= c.node_id ORDER BY m.node_id LIMIT 1) AS n
  LEFT JOIN gateways g ON g.gateway_id = p.gateway_id AND g.lease_until > relay_now()
 WHERE n.node_id = c.node_id"
        )
    };
}

const CAPABLE_PROVIDERS: &str = capable_providers!(
    "SELECT workspace_id, node_id, provider, name, kind, queue, tells_caller, false AS implied
       FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, name)
       JOIN node_capabilities USING (workspace_id, name)"
);

// The open invocations of each action follow the providers.
// In one statement, because each round trip lengthens the turn for which other placements of the workspace wait.
const CAPABLE_PROVIDERS_AND_OPEN_COUNTS: &str = concatcp!(
    CAPABLE_PROVIDERS,
    "
 UNION ALL
SELECT workspace_id, action_name, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, count(*)
  FROM invocations
 WHERE completed_at IS NULL AND workspace_id = ANY ($4) GROUP BY workspace_id, action_name"
);

// The host of an agent can be asked to release it, whatever it advertises.
const RELEASING_HOSTS: &str = capable_providers!(
    "SELECT h.workspace_id, h.node_id, h.provider, r.name, 'capacity' AS kind, false AS queue, false AS tells_caller,
            true AS implied
       FROM unnest($1::bigint[], $2::text[]) AS t (workspace_id, node_id)
      CROSS JOIN (VALUES ($4::text)) AS r (name)
       JOIN providers h USING (workspace_id, node_id)
      WHERE NOT EXISTS (SELECT FROM node_capabilities own
                         WHERE own.workspace_id = h.workspace_id AND own.node_id = h.node_id
                           AND own.provider = h.provider AND own.name = r.name)"
);

/// Number of open invocations of an action.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct OpenCount {
    pub(crate) workspace_id: WorkspaceId,
    #[sqlx(rename = "name")]
    pub(crate) action_name: String,
    pub(crate) open: i64,
}

/// Capabilities that a transaction places, each once.
#[derive(Default)]
struct WantedCapabilities<'a> {
    names: BTreeSet<(WorkspaceId, &'a str)>,
    /// Nodes that are to release agents.
    hosts: BTreeSet<(WorkspaceId, &'a NodeId)>,
}

impl<'a> WantedCapabilities<'a> {
    fn collect(wanted: impl Iterator<Item = (WorkspaceScope, &'a str, Option<&'a NodeId>)>) -> Self {
        let mut all = Self::default();
        for (scope, capability, target) in wanted {
            let workspace = scope.workspace_id();
            all.names.insert((workspace, capability));
            if capability.starts_with(SPAWN_PREFIX) {
                all.names.insert((workspace, SPAWN));
            }
            if let Some(node) = target.filter(|_| capability == RELEASE) {
                all.hosts.insert((workspace, node));
            }
        }
        all
    }
}

impl Candidates {
    /// Reads the providers with these capabilities, and for releases those of the target nodes. Requires the lock of
    /// placements in the workspaces.
    pub(crate) async fn read<'a>(
        tx: &mut DatabaseSession,
        wanted: impl Iterator<Item = (WorkspaceScope, &'a str, Option<&'a NodeId>)>,
    ) -> StoreResult<Self> {
        Ok(Self::read_by(CAPABLE_PROVIDERS, tx, &[], &WantedCapabilities::collect(wanted)).await?.0)
    }

    /// Reads the providers as [`Candidates::read`] does, and the open invocations of these workspaces.
    pub(crate) async fn read_with_open_counts<'a>(
        tx: &mut DatabaseSession,
        workspaces: &BTreeSet<WorkspaceId>,
        wanted: impl Iterator<Item = (WorkspaceScope, &'a str, Option<&'a NodeId>)>,
    ) -> StoreResult<(Self, Vec<OpenCount>)> {
        let workspaces: Vec<WorkspaceId> = workspaces.iter().copied().collect();
        let wanted = WantedCapabilities::collect(wanted);
        Self::read_by(CAPABLE_PROVIDERS_AND_OPEN_COUNTS, tx, &workspaces, &wanted).await
    }

    async fn read_by(
        statement: &'static str,
        tx: &mut DatabaseSession,
        workspaces: &[WorkspaceId],
        wanted: &WantedCapabilities<'_>,
    ) -> StoreResult<(Self, Vec<OpenCount>)> {
        let doing = "reading providers with a capability";
        let (workspaces_of_names, names): (Vec<WorkspaceId>, Vec<&str>) = wanted.names.iter().copied().unzip();
        let rows = sqlx::query(statement)
            .bind(workspaces_of_names)
            .bind(names)
            .bind(NODE_TTL.as_secs_f64())
            // `CAPABLE_PROVIDERS` has no fourth parameter. Postgres accepts a value that the statement does not use.
            .bind(workspaces)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // A row of open invocations has their number in `open`, that of a provider a null.
        let is_provider = |row: &PgRow| matches!(row.try_get::<Option<i64>, _>("open"), Ok(None));
        let (mut rows, counts): (Vec<PgRow>, Vec<PgRow>) = rows.into_iter().partition(is_provider);
        let counts = decode_rows("invocations", &counts)?;
        if !wanted.hosts.is_empty() {
            let (workspaces_of_hosts, hosts): (Vec<WorkspaceId>, Vec<&NodeId>) = wanted.hosts.iter().copied().unzip();
            let hosts = sqlx::query(RELEASING_HOSTS)
                .bind(workspaces_of_hosts)
                .bind(hosts)
                .bind(NODE_TTL.as_secs_f64())
                .bind(RELEASE)
                .fetch_all(tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            rows.extend(hosts);
        }
        let mut providers: Vec<CapableProvider> = decode_rows("node_capabilities", &rows)?;
        // One order for equal choices.
        providers.sort_unstable_by(|a, b| a.key().cmp(&b.key()));
        Ok((Self { providers }, counts))
    }

    /// Chooses a provider for one invocation, and counts the reservation for later choices of the same transaction.
    pub(crate) fn place(&mut self, wanted: &PlacementQuery<'_>, at: DateTime<Utc>) -> Placement {
        let workspace = wanted.scope.workspace_id();
        let matching: Vec<usize> = (0..self.providers.len())
            .filter(|&i| self.providers[i].workspace_id == workspace && self.providers[i].name == wanted.capability)
            .collect();
        let is_own_capacity = wanted.only_capacity && wanted.target.is_some();
        let has_policy = |node: &NodeId| {
            !is_own_capacity
                && self.providers.iter().any(|provider| {
                    provider.workspace_id == workspace && provider.node_id == *node && provider.is_policy(wanted)
                })
        };
        let candidates: Vec<Candidate> = matching
            .iter()
            .map(|&i| self.providers[i].candidate(wanted, has_policy(&self.providers[i].node_id)))
            .collect();
        let target = match (wanted.target, wanted.provider) {
            (Some(node), Some(provider)) => PlacementTarget::Provider(node.clone(), provider.clone()),
            (Some(node), None) => PlacementTarget::Node(node.clone()),
            (None, _) => PlacementTarget::Any,
        };
        let request = PlacementRequest { target };
        let decision = place(&candidates, &request, wanted.entropy);
        let chosen = decision.chosen.and_then(|nth| matching.get(nth).copied());
        let record = self.record(wanted, &matching, &decision, at);
        let matches_target = |provider: &CapableProvider| {
            provider.is_capable(wanted)
                && wanted.target.is_none_or(|node| *node == provider.node_id)
                && wanted.provider.is_none_or(|name| *name == provider.provider)
        };
        let may_queue = matching.iter().any(|&i| matches_target(&self.providers[i]) && self.providers[i].queue);
        let full = chosen.is_none() && decision.skipped.iter().any(|(_, skip)| matches!(skip, SkipReason::Full));
        let chosen = chosen.map(|i| {
            let provider = self.providers[i].clone();
            if provider.occupies_slot() {
                // The list has one entry per capability of a provider, and all of them share its slots.
                let same = |a: &&mut CapableProvider| {
                    a.workspace_id == workspace && a.node_id == provider.node_id && a.provider == provider.provider
                };
                self.providers.iter_mut().filter(same).for_each(|a| a.reserved += 1);
            }
            provider
        });
        Placement { chosen, full, may_queue, record }
    }

    fn record(
        &self,
        wanted: &PlacementQuery<'_>,
        matching: &[usize],
        decision: &PlacementDecision,
        at: DateTime<Utc>,
    ) -> PlacementRecord {
        let chosen = decision.chosen.and_then(|nth| matching.get(nth)).map(|&i| &self.providers[i]);
        let name_of = |id: &NodeId| {
            matching
                .iter()
                .map(|&i| &self.providers[i])
                .find(|provider| provider.node_id == *id)
                .map(|provider| provider.node_name.clone())
        };
        let skipped = decision.skipped.iter().take(NAMED_SKIPS).map(|(id, skip)| SkippedNode {
            node_id: id.clone(),
            node: name_of(id),
            reason: skip.as_str().to_owned(),
        });
        let count = |items: usize| i64::try_from(items).unwrap_or(i64::MAX);
        PlacementRecord {
            attempt: wanted.attempt,
            at: at.timestamp_millis(),
            capability: wanted.capability.to_owned(),
            target: wanted.target.cloned(),
            chosen: chosen.map(|provider| ChosenProvider {
                node_id: provider.node_id.clone(),
                node: provider.node_name.clone(),
                provider: provider.provider.clone(),
                active: provider.active,
                reserved: provider.reserved,
                max_agents: provider.max_agents,
                load: provider.load_measured.then_some(provider.load),
            }),
            candidates: count(matching.len()),
            skipped: skipped.collect(),
            skipped_unnamed: count(decision.skipped.len().saturating_sub(NAMED_SKIPS)),
        }
    }
}
