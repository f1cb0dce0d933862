//! The scope that an observer needs for an event, by the event's kind.

use super::ObserverScope;
use crate::events::kind::{MESSAGE_REACTED, THREAD_REPLY, WEBHOOK_RECEIVED, family};

/// Returns the scope that an observer needs to see events of a kind, besides `stream:read`.
///
/// Every event of a conversation requires `dms:read`, whatever its kind.
#[must_use]
pub(super) fn required_scope(kind: &str, has_conversation: bool) -> ObserverScope {
    if has_conversation {
        return ObserverScope::Dms;
    }
    match kind {
        MESSAGE_REACTED => ObserverScope::Reactions,
        THREAD_REPLY => ObserverScope::Threads,
        WEBHOOK_RECEIVED => ObserverScope::Messages,
        _ => match family(kind) {
            "message" => ObserverScope::Messages,
            "dm" | "group_dm" => ObserverScope::Dms,
            "file" => ObserverScope::Files,
            "agent" if kind.starts_with("agent.status.") => ObserverScope::Agents,
            "channel" | "member" => ObserverScope::Channels,
            "delivery" => ObserverScope::Deliveries,
            "node" => ObserverScope::Nodes,
            // Actions, session events, and kinds that a later version has recorded.
            _ => ObserverScope::Activity,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::kind::*;

    #[test]
    fn every_kind_requires_the_documented_scope() {
        use ObserverScope::{Activity, Agents, Channels, Deliveries, Dms, Files, Messages, Nodes, Reactions, Threads};
        for (kind, scope) in [
            (MESSAGE_CREATED, Messages),
            (MESSAGE_UPDATED, Messages),
            (MESSAGE_READ, Messages),
            (WEBHOOK_RECEIVED, Messages),
            (THREAD_REPLY, Threads),
            (MESSAGE_REACTED, Reactions),
            (DM_RECEIVED, Dms),
            (GROUP_DM_RECEIVED, Dms),
            (FILE_UPLOADED, Files),
            (AGENT_STATUS_CHANGED, Agents),
            (AGENT_STATUS_ACTIVE, Agents),
            (AGENT_STATUS_IDLE, Agents),
            (AGENT_STATUS_BLOCKED, Agents),
            (AGENT_STATUS_WAITING, Agents),
            (AGENT_STATUS_OFFLINE, Agents),
            (AGENT_IDENTITY_TAKEN_OVER, Activity),
            (AGENT_EXITED, Activity),
            (CHANNEL_CREATED, Channels),
            (CHANNEL_UPDATED, Channels),
            (CHANNEL_ARCHIVED, Channels),
            (MEMBER_JOINED, Channels),
            (MEMBER_LEFT, Channels),
            (MEMBER_CHANNEL_MUTED, Channels),
            (MEMBER_CHANNEL_UNMUTED, Channels),
            (DELIVERY_ACCEPTED, Deliveries),
            (DELIVERY_DELIVERED, Deliveries),
            (DELIVERY_DEFERRED, Deliveries),
            (DELIVERY_FAILED, Deliveries),
            (NODE_REGISTERED, Nodes),
            (NODE_DELETED, Nodes),
            (NODE_ONLINE, Nodes),
            (NODE_OFFLINE, Nodes),
            (ACTION_REGISTERED, Activity),
            (ACTION_INVOKED, Activity),
            (ACTION_COMPLETED, Activity),
            (ACTION_FAILED, Activity),
            (ACTION_DENIED, Activity),
            (TOKEN_CREATED, Activity),
            (TOKEN_ROTATED, Activity),
            (TOKEN_REVOKED, Activity),
            (WORKSPACE_UPDATED, Activity),
            (ACCESS_DENIED, Activity),
            (ACTION_TAKEN_OVER, Activity),
            ("harness.tool.called", Activity),
            ("something", Activity),
            ("", Activity),
        ] {
            assert_eq!(required_scope(kind, false), scope, "{kind}");
            assert_eq!(required_scope(kind, true), Dms, "{kind} of a conversation");
        }
    }
}
