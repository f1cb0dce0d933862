//! Assignment of unassigned agents to the fittest provider of their node, as SQL conditions and as [`NodeProviders`]
//! for a new binding.
//!
//! A node may have providers that only handle actions. Their clients receive `deliver` frames and acknowledge none
//! (docs/protocol/node.md, "Client-specific rules"), so agents are located there only if the node has no better
//! provider.

use relay_domain::{NodeId, ProviderName, WorkspaceScope};

use crate::{StoreError, StoreResult, connections::DatabaseSession};

/// SQL rank of a provider for hosting agents: 2 with delivery cursors or a published broker version, 1 with any
/// capacity, otherwise 0.
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

/// SQL condition: the provider is connected, or sent a heartbeat within a day. A provider that never returns blocks the
/// assignment for at most that long.
macro_rules! recently_connected {
    ($provider:literal) => {
        concat!(
            "(",
            $provider,
            ".gateway_id IS NOT NULL OR ",
            $provider,
            ".last_heartbeat_at > relay_now() - interval '1 day')"
        )
    };
}

/// SQL condition: a provider of a node in a workspace, in this order, hosts the unassigned agents, because no eligible
/// provider of the node has a higher rank. The only provider of a node always hosts them.
macro_rules! hosts_unassigned {
    ($workspace:literal, $node:literal, $provider:literal) => {
        concat!(
            "NOT EXISTS (SELECT FROM providers own JOIN providers other USING (workspace_id, node_id)
                          WHERE own.workspace_id = ",
            $workspace,
            " AND own.node_id = ",
            $node,
            " AND own.provider = ",
            $provider,
            " AND ",
            $crate::nodes::assignment::recently_connected!("other"),
            " AND ",
            $crate::nodes::assignment::fitness!("other"),
            " > ",
            $crate::nodes::assignment::fitness!("own"),
            ")"
        )
    };
}

/// SQL condition: an agent is not running. It is offline, or its node uses a socket and has no connected provider for
/// it. REST calls make such an agent active for a while without starting it. True for a missing agent.
macro_rules! is_not_running {
    ($agent:literal) => {
        const_format::concatcp!(
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
            ".node_id AND its.kind <> '",
            $crate::codes::WS,
            "'))"
        )
    };
}
pub(crate) use {fitness, hosts_unassigned, is_not_running, recently_connected};

/// Providers of a node, as input for locating an agent there.
pub(crate) struct NodeProviders {
    pub(crate) names: Vec<ProviderName>,
    /// Maximum number of agents of each provider; 0 means unlimited.
    pub(crate) limits: Vec<i32>,
    /// Provider for an agent that names none.
    pub(crate) host: Option<ProviderName>,
}

#[derive(sqlx::FromRow)]
struct ProviderRank {
    provider: ProviderName,
    max_agents: i32,
    connected: bool,
    recently_connected: bool,
    fitness: i32,
}

/// Reads the providers of a node.
pub(crate) async fn read_providers(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    node: &NodeId,
) -> StoreResult<NodeProviders> {
    let providers: Vec<ProviderRank> = sqlx::query_as(concat!(
        "SELECT provider, max_agents, gateway_id IS NOT NULL AS connected, ",
        recently_connected!("p"),
        " AS recently_connected, ",
        fitness!("p"),
        " AS fitness FROM providers p WHERE workspace_id = $1 AND node_id = $2"
    ))
    .bind(scope.workspace_id())
    .bind(node)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("reading the providers of a node"))?;
    Ok(NodeProviders {
        host: choose_host(&providers).cloned(),
        limits: providers.iter().map(|provider| provider.max_agents).collect(),
        names: providers.into_iter().map(|provider| provider.provider).collect(),
    })
}

/// Returns the node's only provider, or the single connected one of the highest rank. Returns `None` if there are
/// several such providers or none, or if all of them have rank 0.
fn choose_host(providers: &[ProviderRank]) -> Option<&ProviderName> {
    // Also while it is disconnected: the agent waits for it.
    if let [only] = providers {
        return Some(&only.provider);
    }
    // Includes providers that lost their connection lately: an agent waits for the fittest one instead of moving to a
    // lesser one.
    let fittest =
        providers.iter().filter(|provider| provider.recently_connected).map(|provider| provider.fitness).max()?;
    let mut fit = providers.iter().filter(|provider| provider.connected && provider.fitness == fittest && fittest > 0);
    let first = fit.next()?;
    fit.next().is_none().then_some(&first.provider)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_goes_to_the_fittest_provider_that_is_there() {
        let provider = |name: &str, fitness: i32, connected: bool, recently_connected: bool| ProviderRank {
            provider: ProviderName::new(name),
            max_agents: 0,
            connected,
            recently_connected,
            fitness,
        };
        let check = |providers: &[ProviderRank], expected: Option<&str>| {
            assert_eq!(choose_host(providers).map(ProviderName::as_str), expected)
        };
        check(&[], None);
        check(&[provider("only", 0, false, false)], Some("only"));
        check(&[provider("broker", 2, true, true), provider("tools", 0, true, true)], Some("broker"));
        check(&[provider("broker", 2, true, true), provider("runner", 1, true, true)], Some("broker"));
        check(&[provider("runner", 1, true, true), provider("tools", 0, true, true)], Some("runner"));
        // The broker is disconnected for a moment: the agent waits for it.
        check(&[provider("broker", 2, false, true), provider("runner", 1, true, true)], None);
        check(&[provider("broker", 2, false, false), provider("runner", 1, true, true)], Some("runner"));
        check(&[provider("broker", 2, true, true), provider("old", 2, false, true)], Some("broker"));
        check(&[provider("one", 2, true, true), provider("two", 2, true, true)], None);
        check(&[provider("tools", 0, true, true), provider("others", 0, true, true)], None);
    }
}
