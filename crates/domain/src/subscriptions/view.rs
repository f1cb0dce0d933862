//! Agents that may read an event over REST, which its subscriptions follow. Main type: [`EventReach`].

use crate::{AgentId, events::Event};

/// Agents that may read an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventReach<'a> {
    /// Every agent: channels, agents, nodes and files are open to all agents of a workspace.
    EveryAgent,
    /// The participants of a conversation.
    Conversation(&'a str),
    /// This agent, while it takes part in a conversation.
    ConversationOf(&'a str, AgentId),
    Agent(AgentId),
    /// The caller and the handler of the invocation that it is about.
    Invocation,
    NoAgent,
}

/// Returns the agents that may read an event.
#[must_use]
pub fn reach_of_event(event: &Event) -> EventReach<'_> {
    let family = event.kind.split_once('.').map_or(&*event.kind, |(family, _)| family);
    match (family, event.conversation_id.as_deref(), event.agent_id) {
        // The recipient's own list of deliveries shows them.
        ("delivery", Some(conversation), Some(agent)) => EventReach::ConversationOf(conversation, agent),
        ("delivery", None, Some(agent)) => EventReach::Agent(agent),
        ("action", ..) => EventReach::Invocation,
        (_, Some(conversation), _) => EventReach::Conversation(conversation),
        // A direct message without its conversation, and kinds of later versions.
        ("message" | "thread" | "agent" | "channel" | "member" | "file" | "webhook" | "node", None, _) => {
            EventReach::EveryAgent
        }
        _ => EventReach::NoAgent,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::{ChannelId, events::kind};

    const ANN: AgentId = AgentId::new(1);

    #[test]
    fn every_subscribable_kind_has_its_readers() {
        for kind in kind::SUBSCRIBABLE {
            let plain = Event::new(*kind, Value::Null);
            let in_channel = plain.clone().in_channel(ChannelId::new(1), "general").by_agent(ANN);
            let in_dm = plain.clone().in_conversation(Some("dm_1".to_owned())).by_agent(ANN);
            let (open, private) = (reach_of_event(&in_channel), reach_of_event(&in_dm));
            match kind.split_once('.').map_or("", |(family, _)| family) {
                "delivery" => {
                    assert_eq!(open, EventReach::Agent(ANN), "{kind}");
                    assert_eq!(private, EventReach::ConversationOf("dm_1", ANN), "{kind}");
                    assert_eq!(reach_of_event(&plain), EventReach::NoAgent, "{kind} without a recipient");
                }
                "action" => assert_eq!((open, private), (EventReach::Invocation, EventReach::Invocation), "{kind}"),
                "dm" | "group_dm" => {
                    assert_eq!(private, EventReach::Conversation("dm_1"), "{kind}");
                    assert_eq!(reach_of_event(&plain), EventReach::NoAgent, "{kind} without its conversation");
                }
                _ => {
                    assert_eq!(open, EventReach::EveryAgent, "{kind}");
                    assert_eq!(private, EventReach::Conversation("dm_1"), "{kind}");
                }
            }
        }
        assert_eq!(reach_of_event(&Event::new("harness.log", Value::Null)), EventReach::NoAgent);
    }
}
