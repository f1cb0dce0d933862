//! Which providers of a node have the agents that are of no particular one, and whether anybody has an agent.
//!
//! Beside its broker a node may have providers that only handle actions. Their clients take `deliver` frames and
//! acknowledge none (contract: node.md 15.2), so an agent is not to be located there while the node has a better place
//! for it.

use relay_domain::{NodeId, WorkspaceScope};
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// How fit a provider is to have agents: 2 if it keeps cursors or is one of the published brokers, 1 if it says that
/// it brings something up, else 0.
macro_rules! fitness {
    ($provider:literal) => {
        concat!(
            "CASE WHEN ",
            $provider,
            ".cursor_granted OR ",
            $provider,
            ".version LIKE 'relay-broker/%' THEN 2 WHEN ",
            $provider,
            r#".capabilities @> '[{"kind":"capacity"}]' THEN 1 ELSE 0 END"#
        )
    };
}

/// Whether a provider counts: it is connected, or was heard of within a day. One that never comes back keeps agents
/// from nobody for longer.
macro_rules! counts {
    ($provider:literal) => {
        concat!(
            "(",
            $provider,
            ".gateway_id IS NOT NULL OR ",
            $provider,
            ".last_heartbeat_at > now() - interval '1 day')"
        )
    };
}

/// Whether the provider `$3` of node `$2` in workspace `$1` has the agents of no particular provider: the node has
/// none that is fitter. The only one of its node always has them.
macro_rules! has_unclaimed {
    () => {
        concat!(
            "NOT EXISTS (SELECT FROM providers own JOIN providers other USING (workspace_id, node_id)
                          WHERE own.workspace_id = $1 AND own.node_id = $2 AND own.provider = $3 AND ",
            $crate::located::counts!("other"),
            " AND ",
            $crate::located::fitness!("other"),
            " > ",
            $crate::located::fitness!("own"),
            ")"
        )
    };
}

/// Whether an agent has ended: it is offline, or its node would have it over a socket and has none for it. What it
/// calls after that makes it active for a while, and brings it up nowhere. True of no agent at all.
macro_rules! has_ended {
    ($agent:literal) => {
        concat!(
            "(coalesce(",
            $agent,
            ".status, 'offline') = 'offline'
              OR NOT EXISTS (SELECT FROM providers at_it
                              WHERE at_it.workspace_id = ",
            $agent,
            ".workspace_id AND at_it.node_id = ",
            $agent,
            ".node_id AND at_it.provider = coalesce(",
            $agent,
            ".provider, at_it.provider) AND at_it.gateway_id IS NOT NULL)
             AND NOT EXISTS (SELECT FROM nodes its
                              WHERE its.workspace_id = ",
            $agent,
            ".workspace_id AND its.node_id = ",
            $agent,
            ".node_id AND its.kind <> 'ws'))"
        )
    };
}
pub(crate) use {counts, fitness, has_ended, has_unclaimed};

/// The providers of a node, for an agent that is to be located there.
pub(crate) struct Providers {
    /// Their names.
    pub(crate) names: Vec<String>,
    /// How many agents each takes; 0 for unlimited.
    pub(crate) limits: Vec<i32>,
    /// Which of them gets an agent that names none.
    pub(crate) host: Option<String>,
}

#[derive(sqlx::FromRow)]
struct Known {
    provider: String,
    max_agents: i32,
    connected: bool,
    counts: bool,
    fitness: i32,
}

/// Reads the providers of a node.
pub(crate) async fn providers(tx: &mut PgConnection, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Providers> {
    let known: Vec<Known> = sqlx::query_as(concat!(
        "SELECT provider, max_agents, gateway_id IS NOT NULL AS connected, ",
        counts!("p"),
        " AS counts, ",
        fitness!("p"),
        " AS fitness FROM providers p WHERE workspace_id = $1 AND node_id = $2"
    ))
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("reading the providers of a node"))?;
    Ok(Providers {
        host: host(&known).map(str::to_owned),
        limits: known.iter().map(|provider| provider.max_agents).collect(),
        names: known.into_iter().map(|provider| provider.provider).collect(),
    })
}

/// The node's only provider; of several the one that is connected among the fittest. None where that leaves a choice,
/// or nobody.
fn host(known: &[Known]) -> Option<&str> {
    if let [only] = known {
        return Some(&only.provider);
    }
    let fittest = known.iter().filter(|provider| provider.counts).map(|provider| provider.fitness).max()?;
    let mut fit = known.iter().filter(|provider| provider.connected && provider.fitness == fittest && fittest > 0);
    let first = fit.next()?;
    fit.next().is_none().then_some(first.provider.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_goes_to_the_fittest_provider_that_is_there() {
        let known = |name: &str, fitness: i32, connected: bool, counts: bool| Known {
            provider: name.to_owned(),
            max_agents: 0,
            connected,
            counts,
            fitness,
        };
        let check = |providers: &[Known], expected: Option<&str>| assert_eq!(host(providers), expected);
        check(&[], None);
        check(&[known("only", 0, false, false)], Some("only"));
        check(&[known("broker", 2, true, true), known("tools", 0, true, true)], Some("broker"));
        check(&[known("broker", 2, true, true), known("runner", 1, true, true)], Some("broker"));
        check(&[known("runner", 1, true, true), known("tools", 0, true, true)], Some("runner"));
        // The broker is away for a moment: the agent waits for it.
        check(&[known("broker", 2, false, true), known("runner", 1, true, true)], None);
        check(&[known("broker", 2, false, false), known("runner", 1, true, true)], Some("runner"));
        check(&[known("broker", 2, true, true), known("old", 2, false, true)], Some("broker"));
        check(&[known("one", 2, true, true), known("two", 2, true, true)], None);
        check(&[known("tools", 0, true, true), known("others", 0, true, true)], None);
    }
}
