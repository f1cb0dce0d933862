//! Event kinds, and the facts of an event that decide which observers see it.
//!
//! Kinds are the `type` of events for observers, subscriptions and the event log. The engine builds the payloads.

use chrono::{DateTime, Utc};

use crate::{AgentId, ChannelId};

/// A root message in a channel.
pub const MESSAGE_CREATED: &str = "message.created";
/// The text of a message has changed.
pub const MESSAGE_UPDATED: &str = "message.updated";
/// A reaction was added or removed.
pub const MESSAGE_REACTED: &str = "message.reacted";
/// An agent has read a message for the first time.
pub const MESSAGE_READ: &str = "message.read";
/// A reply in a thread.
pub const THREAD_REPLY: &str = "thread.reply";
/// A message in a one-to-one conversation.
pub const DM_RECEIVED: &str = "dm.received";
/// A message in a group conversation.
pub const GROUP_DM_RECEIVED: &str = "group_dm.received";
/// The status of an agent was set.
pub const AGENT_STATUS_CHANGED: &str = "agent.status.changed";
/// An agent has become active.
pub const AGENT_STATUS_ACTIVE: &str = "agent.status.active";
/// An agent has become idle.
pub const AGENT_STATUS_IDLE: &str = "agent.status.idle";
/// An agent has become blocked.
pub const AGENT_STATUS_BLOCKED: &str = "agent.status.blocked";
/// An agent waits for something.
pub const AGENT_STATUS_WAITING: &str = "agent.status.waiting";
/// An agent has gone offline.
pub const AGENT_STATUS_OFFLINE: &str = "agent.status.offline";
/// An agent's identity was taken over.
pub const AGENT_IDENTITY_TAKEN_OVER: &str = "agent.identity_taken_over";
/// A spawned agent has ended.
pub const AGENT_EXITED: &str = "agent.exited";
/// A channel was created.
pub const CHANNEL_CREATED: &str = "channel.created";
/// A channel's topic or metadata has changed.
pub const CHANNEL_UPDATED: &str = "channel.updated";
/// A channel was archived.
pub const CHANNEL_ARCHIVED: &str = "channel.archived";
/// An agent has joined a channel.
pub const MEMBER_JOINED: &str = "member.joined";
/// An agent has left a channel.
pub const MEMBER_LEFT: &str = "member.left";
/// A member has muted a channel.
pub const MEMBER_CHANNEL_MUTED: &str = "member.channel_muted";
/// A member has unmuted a channel.
pub const MEMBER_CHANNEL_UNMUTED: &str = "member.channel_unmuted";
/// A file is complete.
pub const FILE_UPLOADED: &str = "file.uploaded";
/// An inbound webhook was called.
pub const WEBHOOK_RECEIVED: &str = "webhook.received";
/// An action was registered.
pub const ACTION_REGISTERED: &str = "action.registered";
/// An action was invoked.
pub const ACTION_INVOKED: &str = "action.invoked";
/// An invocation has succeeded.
pub const ACTION_COMPLETED: &str = "action.completed";
/// An invocation has failed.
pub const ACTION_FAILED: &str = "action.failed";
/// An invocation was refused.
pub const ACTION_DENIED: &str = "action.denied";
/// An agent was refused something that its rights do not permit.
pub const ACCESS_DENIED: &str = "access.denied";
/// The handler of an action was replaced, because it was not live.
pub const ACTION_TAKEN_OVER: &str = "action.taken_over";
/// A delivery was accepted.
pub const DELIVERY_ACCEPTED: &str = "delivery.accepted";
/// A delivery was acknowledged by its recipient. The name is historical.
pub const DELIVERY_DELIVERED: &str = "delivery.delivered";
/// A delivery was deferred by its recipient.
pub const DELIVERY_DEFERRED: &str = "delivery.deferred";
/// A delivery has failed or was rejected.
pub const DELIVERY_FAILED: &str = "delivery.failed";
/// A node was enrolled.
pub const NODE_REGISTERED: &str = "node.registered";
/// A node was deleted.
pub const NODE_DELETED: &str = "node.deleted";
/// A node has come online.
pub const NODE_ONLINE: &str = "node.status.online";
/// A node has gone offline.
pub const NODE_OFFLINE: &str = "node.status.offline";
/// A subscription was disabled because its URL answered 410 or kept failing.
pub const SUBSCRIPTION_DISABLED: &str = "subscription.disabled";
/// An agent's endpoint answered 410; the binding stays disabled until the agent is bound again.
pub const NODE_BINDING_DISABLED: &str = "node.binding.disabled";
/// An operator has added a workspace key.
pub const TOKEN_CREATED: &str = "token.created";
/// A token was replaced by a new one.
pub const TOKEN_ROTATED: &str = "token.rotated";
/// A token was revoked.
pub const TOKEN_REVOKED: &str = "token.revoked";
/// Settings of the workspace have changed.
pub const WORKSPACE_UPDATED: &str = "workspace.updated";
/// Prefix of the kinds of session events: `harness.<session event type>`.
pub const HARNESS_PREFIX: &str = "harness.";

/// Kinds that an event subscription may name besides `*` (docs/protocol/rest.md, "Subscription body").
pub const SUBSCRIBABLE: &[&str] = &[
    MESSAGE_CREATED,
    MESSAGE_UPDATED,
    MESSAGE_REACTED,
    MESSAGE_READ,
    THREAD_REPLY,
    AGENT_STATUS_CHANGED,
    AGENT_STATUS_IDLE,
    AGENT_STATUS_ACTIVE,
    AGENT_STATUS_BLOCKED,
    AGENT_STATUS_WAITING,
    AGENT_STATUS_OFFLINE,
    CHANNEL_CREATED,
    CHANNEL_UPDATED,
    CHANNEL_ARCHIVED,
    MEMBER_JOINED,
    MEMBER_LEFT,
    DM_RECEIVED,
    GROUP_DM_RECEIVED,
    FILE_UPLOADED,
    WEBHOOK_RECEIVED,
    DELIVERY_ACCEPTED,
    DELIVERY_DELIVERED,
    DELIVERY_DEFERRED,
    DELIVERY_FAILED,
    ACTION_INVOKED,
    ACTION_COMPLETED,
    ACTION_FAILED,
    ACTION_DENIED,
    NODE_BINDING_DISABLED,
];

/// Facts of an event that decide which observers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventFacts<'a> {
    pub kind: &'a str,
    /// Channel that the event concerns. For a conversation, its backing channel.
    pub channel_id: Option<ChannelId>,
    pub channel_name: Option<&'a str>,
    /// Conversation that the event concerns. Only observers of direct messages see such events.
    pub conversation_id: Option<&'a str>,
    /// Author of the event or, where there is none, the agent that it concerns.
    pub agent_id: Option<AgentId>,
    /// Time of the event.
    pub created_at: DateTime<Utc>,
}

/// Returns whether events of this kind always concern a channel. One without a channel id is then hidden from observers
/// whose view is limited to some channels.
pub(crate) fn has_channel_subject(kind: &str) -> bool {
    matches!(family(kind), "message" | "thread" | "channel" | "member" | "delivery" | "webhook")
}

/// Returns the first part of a kind.
pub(crate) fn family(kind: &str) -> &str {
    kind.split_once('.').map_or(kind, |(family, _)| family)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn subscribable_kinds_are_named_once() {
        assert_eq!(SUBSCRIBABLE.iter().collect::<BTreeSet<_>>().len(), 29);
        assert_eq!(SUBSCRIBABLE.len(), 29);
    }
}
