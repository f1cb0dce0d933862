//! Best-effort events for agents' sockets: never acknowledged, never replayed (docs/protocol/node.md, "Event frames"
//! and "Context updates").

use relay_domain::{AgentId, ConversationId};
use relay_store::{
    channels::audience::AudienceKey,
    events::{Event, EventBody, RecordedEvents},
};

use crate::{Engine, channels::audiences::AudienceSource, hints::SocketEvent};

/// Recipients of an event among agents' sockets.
enum Audience {
    /// The workspace's direct nodes, as `context.update`.
    Workspace { topic: &'static str },
    /// The agent that it is about, as `context.update`.
    Agent { topic: &'static str },
    /// The agent that it is about, as a `deliver` frame with seq 0.
    Caller,
    /// The members of its channel or conversation, as a `deliver` frame with seq 0.
    Members,
    /// No socket: the event is sent another way, or is for observers only.
    NoAgent,
}

fn audience_of_kind(kind: &str) -> Audience {
    match kind {
        "message.reacted" | "message.read" => Audience::Members,
        "message.updated" => Audience::Workspace { topic: "thread" },
        "delivery.delivered" | "delivery.deferred" | "delivery.failed" => Audience::Agent { topic: "agent" },
        // Outcomes are sent by the module that records them.
        "action.denied" | "agent.exited" => Audience::Caller,
        _ if kind.starts_with("agent.status.") => Audience::Workspace { topic: "presence" },
        _ if kind.starts_with("channel.") || kind.starts_with("member.") => Audience::Workspace { topic: "channel" },
        "file.uploaded" => Audience::Workspace { topic: "agent" },
        "webhook.received" => Audience::Workspace { topic: "channel" },
        _ => Audience::NoAgent,
    }
}

/// Hints every gateway to pass these events on to sockets.
pub(super) async fn notify_sockets(engine: &Engine, recorded: &RecordedEvents) {
    for (seq, event) in (recorded.first_seq..).zip(&recorded.events) {
        let EventBody::Data(data) = &event.body else { continue };
        // A delivery that was refused or has expired concerns the sender, which has its own notice.
        if event.kind == "delivery.failed" && !data["target_agent_id"].is_null() {
            continue;
        }
        let (agents, topic, event_id) = match audience_of_kind(&event.kind) {
            Audience::NoAgent => continue,
            Audience::Workspace { topic } => match conversation_members(engine, recorded, event).await {
                Some(members) => (Some(members), topic, None),
                None => (None, topic, None),
            },
            Audience::Agent { topic } => (event.agent_id.map(|id| vec![id]), topic, None),
            Audience::Caller => {
                let id = format!("evt-{}-{seq}", recorded.scope.workspace_id());
                (event.agent_id.map(|id| vec![id]), "agent", Some(id))
            }
            // An id of its own: brokers remember ids, and would drop the message itself as a repeat.
            Audience::Members => {
                let id = format!("evt-{}-{seq}", recorded.scope.workspace_id());
                (audience_members(engine, recorded, event).await, "channel", Some(id))
            }
        };
        // A frame with an event id is for certain agents only: without their ids it would go to all direct nodes.
        if agents.is_none() && event_id.is_some() {
            continue;
        }
        let notify = |agents| {
            let (data, event_id) = (data.clone(), event_id.clone());
            engine
                .hints()
                .notify_all(recorded.scope, SocketEvent { agents, topic, event: &event.kind, data, event_id });
        };
        match agents {
            None => notify(None),
            // A hint stays far below NATS' payload limit.
            Some(agents) => agents.chunks(1000).for_each(|some| notify(Some(some.to_vec()))),
        }
    }
}

/// Returns the participants for events of a conversation, which only they may see.
async fn conversation_members(engine: &Engine, recorded: &RecordedEvents, event: &Event) -> Option<Vec<AgentId>> {
    event.conversation_id.as_ref()?;
    // Unknown participants are none: an event of a conversation must not go to the whole workspace.
    Some(audience_members(engine, recorded, event).await.unwrap_or_default())
}

async fn audience_members(engine: &Engine, recorded: &RecordedEvents, event: &Event) -> Option<Vec<AgentId>> {
    let key = match (&event.conversation_id, event.channel_id) {
        (Some(conversation), _) => AudienceKey::Conversation(ConversationId::new(conversation.as_str())),
        (None, Some(channel)) => AudienceKey::Id(channel),
        (None, None) => return None,
    };
    // Best-effort: no recipients while storage is unavailable.
    let audience = engine.events().audiences.load(recorded.scope, key, AudienceSource::Cache).await.ok()??;
    Some(audience.members.iter().map(|member| member.agent_id).collect())
}
