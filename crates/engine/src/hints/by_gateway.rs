//! Hints about mailboxes to the gateways that serve them only. Postgres is asked for these, apart from the caller.

use std::collections::HashMap;

use relay_domain::{AgentId, GatewayId, WorkspaceId, WorkspaceScope, nodes::NodeKind};
use relay_store::nodes::locations::AgentLocation;
use relay_stream::Hint;
use relay_tasks::spawn_isolated;

use super::MAILBOXES_PER_HINT;
use crate::core::Core;

/// Keeps a hint far below NATS' payload limit: a notice has about 300 bytes.
const NOTICES_PER_HINT: usize = 1000;

/// Mailboxes by the gateway that serves them.
type MailboxesByGateway = HashMap<GatewayId, Vec<(WorkspaceId, AgentId)>>;

/// Events of one kind for the socket of one agent.
pub(crate) struct AgentNotices {
    pub(crate) scope: WorkspaceScope,
    pub(crate) agent: AgentId,
    pub(crate) event: &'static str,
    /// Data of each event.
    pub(crate) each: Vec<serde_json::Value>,
}

impl Core {
    /// Sends best-effort events about the deliveries of their senders, together and only to the gateways that serve
    /// these. One post to many full mailboxes, or many dead letters, cause so many.
    pub(crate) fn notify_senders(&self, notices: Vec<AgentNotices>) {
        if notices.is_empty() {
            return;
        }
        let core = self.clone();
        spawn_isolated("notices", async move {
            let agents: Vec<_> = notices.iter().map(|one| (one.scope, one.agent)).collect();
            match core.store.gateways_of_agents(&agents).await {
                Ok(locations) => notices.into_iter().for_each(|one| core.send_notices(one, &locations)),
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "senders are not notified");
                }
            }
        });
    }

    fn send_notices(&self, notices: AgentNotices, locations: &[AgentLocation]) {
        let AgentNotices { scope, agent, event, each } = notices;
        let own = locations.iter().filter(|location| (location.scope, location.agent_id) == (scope, agent));
        for location in own {
            for each in each.chunks(NOTICES_PER_HINT) {
                let (workspace, topic, event) = (scope.workspace_id(), "agent".to_owned(), event.to_owned());
                let hint = Hint::NotifyEach { workspace, agent, topic, event, each: each.to_vec() };
                match (location.kind, location.gateway_id) {
                    // Workers call its endpoint.
                    (NodeKind::HttpPush, _) => self.hints.publish(hint),
                    (NodeKind::Ws | NodeKind::Poll, Some(gateway)) => {
                        self.hints.send_to_gateway(gateway, self.gateway_id(), hint);
                    }
                    // No gateway holds a socket of it, and notices are not kept.
                    (NodeKind::Ws | NodeKind::Poll, None) => {}
                }
            }
        }
    }

    /// Hints that rows of these mailboxes were settled by the engine: to the gateways that serve them, and to all
    /// processes for agents whose deliveries workers dispatch or any gateway hands out. Expiry settles many at once.
    pub(crate) fn mailboxes_settled(&self, mailboxes: Vec<(WorkspaceScope, AgentId)>) {
        let core = self.clone();
        spawn_isolated("hints", async move {
            match core.store.gateways_of_agents(&mailboxes).await {
                Ok(locations) => {
                    let (for_all, by_gateway) = route_mailboxes(&locations);
                    core.hints.mailboxes_changed(for_all);
                    for (gateway, agents) in by_gateway {
                        for some in agents.chunks(MAILBOXES_PER_HINT) {
                            let hint = Hint::MailboxesChanged { agents: some.to_vec() };
                            core.hints.send_to_gateway(gateway, core.gateway_id(), hint);
                        }
                    }
                }
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "failed to locate mailboxes, all processes get the hint"
                    );
                    core.hints.mailboxes_changed(mailboxes);
                }
            }
        });
    }
}

/// Divides mailboxes into those of concern to all processes and those of one gateway. Agents that are served by none
/// need no hint.
fn route_mailboxes(locations: &[AgentLocation]) -> (Vec<(WorkspaceScope, AgentId)>, MailboxesByGateway) {
    let (mut for_all, mut by_gateway) = (Vec::new(), MailboxesByGateway::new());
    for location in locations {
        let (scope, agent) = (location.scope, location.agent_id);
        match (location.kind, location.gateway_id) {
            (NodeKind::HttpPush | NodeKind::Poll, _) => for_all.push((scope, agent)),
            (NodeKind::Ws, Some(gateway)) => {
                by_gateway.entry(gateway).or_default().push((scope.workspace_id(), agent));
            }
            (NodeKind::Ws, None) => {}
        }
    }
    (for_all, by_gateway)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mailboxes_of_sockets_are_of_concern_to_their_gateways_only() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let location = |agent, kind, gateway: Option<i64>| AgentLocation {
            scope,
            agent_id: AgentId::new(agent),
            kind,
            gateway_id: gateway.map(GatewayId::new),
        };
        let (for_all, by_gateway) = route_mailboxes(&[
            location(1, NodeKind::Ws, Some(10)),
            location(2, NodeKind::Ws, Some(20)),
            location(3, NodeKind::Ws, Some(10)),
            location(4, NodeKind::Ws, None),
            location(5, NodeKind::HttpPush, None),
            location(6, NodeKind::Poll, None),
        ]);
        assert_eq!(for_all, [(scope, AgentId::new(5)), (scope, AgentId::new(6))]);
        let of_gateway = |id, agents: &[i64]| {
            (GatewayId::new(id), agents.iter().map(|agent| (scope.workspace_id(), AgentId::new(*agent))).collect())
        };
        assert_eq!(by_gateway, HashMap::from([of_gateway(10, &[1, 3]), of_gateway(20, &[2])]));
    }
}
