//! Events for agents' sockets: best-effort, never acknowledged, never replayed (contract: node.md 4.3).

use relay_domain::{AgentId, ChannelId};
use relay_store::{
    audience::AudienceKey,
    events::{EventBody, NewEvent, Recorded},
};

use crate::Engine;

/// Whose sockets an event goes to.
enum Audience {
    /// The workspace's direct nodes, as `context.update`.
    Workspace { topic: &'static str },
    /// The agent that it is about, as `context.update`.
    Agent { topic: &'static str },
    /// The agent that it is about, as a `deliver` frame with seq 0.
    Caller,
    /// The members of its channel or conversation, as a `deliver` frame with seq 0.
    Members,
    /// Nobody: it travels another way, or is for observers only.
    Nobody,
}

fn audience(kind: &str) -> Audience {
    match kind {
        "message.reacted" | "message.read" => Audience::Members,
        "message.updated" => Audience::Workspace { topic: "thread" },
        "delivery.delivered" | "delivery.deferred" | "delivery.failed" => Audience::Agent { topic: "agent" },
        // Outcomes are told by what records them.
        "action.denied" | "agent.exited" => Audience::Caller,
        _ if kind.starts_with("agent.status.") => Audience::Workspace { topic: "presence" },
        _ if kind.starts_with("channel.") || kind.starts_with("member.") => Audience::Workspace { topic: "channel" },
        "file.uploaded" => Audience::Workspace { topic: "agent" },
        "webhook.received" => Audience::Workspace { topic: "channel" },
        _ => Audience::Nobody,
    }
}

/// Hints every gateway to pass these events on to the sockets that they concern.
pub(super) async fn tell_sockets(engine: &Engine, recorded: &Recorded) {
    for (seq, event) in (recorded.first_seq..).zip(&recorded.events) {
        let EventBody::Data(data) = &event.body else { continue };
        // What was refused at the door or has expired is the sender's to know, and it has been told.
        if event.kind == "delivery.failed" && !data["target_agent_id"].is_null() {
            continue;
        }
        let (agents, topic, event_id) = match audience(&event.kind) {
            Audience::Nobody => continue,
            Audience::Workspace { topic } => match conversation_members(engine, recorded, event).await {
                Some(members) => (Some(members), topic, None),
                None => (None, topic, None),
            },
            Audience::Agent { topic } => (event.agent_id.map(|id| vec![id]), topic, None),
            Audience::Caller => {
                let id = format!("evt-{}-{seq}", recorded.scope.workspace_id());
                (event.agent_id.map(|id| vec![id]), "agent", Some(id))
            }
            // Its own id, never the message's: brokers remember ids, and would take the message for a repeat.
            Audience::Members => {
                let id = format!("evt-{}-{seq}", recorded.scope.workspace_id());
                (members(engine, recorded, event).await, "channel", Some(id))
            }
        };
        if agents.is_none() && event_id.is_some() {
            continue;
        }
        let tell = |agents| {
            engine.hints().notify_all(recorded.scope, agents, topic, &event.kind, data.clone(), event_id.clone());
        };
        match agents {
            None => tell(None),
            // A hint stays far below NATS' payload limit.
            Some(agents) => agents.chunks(1000).for_each(|some| tell(Some(some.to_vec()))),
        }
    }
}

/// What happens in a conversation is its participants' business only.
async fn conversation_members(engine: &Engine, recorded: &Recorded, event: &NewEvent) -> Option<Vec<AgentId>> {
    event.conversation_id.as_ref()?;
    Some(members(engine, recorded, event).await.unwrap_or_default())
}

async fn members(engine: &Engine, recorded: &Recorded, event: &NewEvent) -> Option<Vec<AgentId>> {
    let key = match (&event.conversation_id, event.channel_id) {
        (Some(conversation), _) => AudienceKey::Conversation(conversation.clone()),
        (None, Some(channel)) => AudienceKey::Id(ChannelId::new(channel.get())),
        (None, None) => return None,
    };
    // Best-effort: with storage away nobody is told.
    let audience = engine.audience(recorded.scope, key, false).await.ok()??;
    Some(audience.members.iter().map(|member| AgentId::new(member.agent_id)).collect())
}
