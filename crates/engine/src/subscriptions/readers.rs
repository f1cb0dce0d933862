//! Readers of subscribed events: the agent that owns a subscription receives what it may read over REST.

use std::collections::HashSet;

use relay_domain::{
    AgentId, InvocationId, WorkspaceScope,
    access::rights::Right,
    events::{Event, EventBody, EventSeq},
    subscriptions::view::{EventReach, reach_of_event},
};
use relay_store::events::RecordedEvents;

use super::{Lease, Subscriptions};
use crate::EngineResult;

/// Part of the events that the owner of a subscription may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventAccess {
    All,
    /// Those of its conversations, deliveries and invocations, and those that every agent may read.
    Own,
    /// None: it was deleted, or may not subscribe any more.
    None,
}

/// Reader of a page of events, with the facts that decide about them.
#[derive(Debug)]
pub(super) struct EventReader {
    access: EventAccess,
    owner: Option<AgentId>,
    conversations: HashSet<String>,
    invocations: HashSet<InvocationId>,
}

impl EventReader {
    /// Returns whether the reader may read an event.
    pub(super) fn reads(&self, event: &Event) -> bool {
        match self.access {
            EventAccess::All => true,
            EventAccess::None => false,
            EventAccess::Own => match reach_of_event(event) {
                EventReach::EveryAgent => true,
                EventReach::Conversation(id) => self.conversations.contains(id),
                EventReach::ConversationOf(id, agent) => self.owner == Some(agent) && self.conversations.contains(id),
                EventReach::Agent(agent) => self.owner == Some(agent),
                EventReach::Invocation => {
                    self.owner == event.agent_id
                        || invocation_of(event).is_some_and(|id| self.invocations.contains(&id))
                }
                EventReach::NoAgent => false,
            },
        }
    }
}

impl Subscriptions {
    /// Returns the events that the owner of a subscription may read now.
    pub(super) async fn event_access(&self, scope: WorkspaceScope, owner: AgentId) -> EngineResult<EventAccess> {
        let found = self.core.store.agents_with_rights(scope, &[owner]).await?;
        Ok(match found.first() {
            // First: without the right to subscribe, that to read all events does not count here.
            Some(agent) if !agent.rights.has(Right::Subscribe) => EventAccess::None,
            Some(agent) if agent.rights.has(Right::ReadAllEvents) => EventAccess::All,
            Some(_) => EventAccess::Own,
            None => EventAccess::None,
        })
    }

    /// Reads the facts that decide which of these events above `since` the owner of a subscription may read.
    pub(super) async fn reader_of_events(
        &self,
        lease: &Lease,
        records: &[RecordedEvents],
        since: EventSeq,
    ) -> EngineResult<EventReader> {
        let access = match lease.owner {
            None => EventAccess::All,
            Some(owner) => self.event_access(lease.scope, owner).await?,
        };
        let mut reader =
            EventReader { access, owner: lease.owner, conversations: HashSet::new(), invocations: HashSet::new() };
        // Any other access depends on no further facts.
        let (EventAccess::Own, Some(owner)) = (access, lease.owner) else { return Ok(reader) };
        let (mut conversations, mut invocations) = (HashSet::new(), HashSet::new());
        let events = records.iter().flat_map(|record| (record.first_seq..).zip(&record.events));
        // A record of several events may begin below the position.
        for (_, event) in events.filter(|(seq, _)| *seq > since) {
            match reach_of_event(event) {
                EventReach::Conversation(id) | EventReach::ConversationOf(id, _) => {
                    conversations.insert(id);
                }
                EventReach::Invocation => invocations.extend(invocation_of(event)),
                EventReach::EveryAgent | EventReach::Agent(_) | EventReach::NoAgent => {}
            }
        }
        let store = &self.core.store;
        // Most pages are about one of the two at most, and cost no other statement.
        if !conversations.is_empty() {
            let ids: Vec<&str> = conversations.into_iter().collect();
            reader.conversations.extend(store.conversations_with_member(lease.scope, owner, &ids).await?);
        }
        if !invocations.is_empty() {
            let ids: Vec<InvocationId> = invocations.into_iter().collect();
            reader.invocations.extend(store.invocations_with_party(lease.scope, owner, &ids).await?);
        }
        Ok(reader)
    }
}

/// Returns the invocation that an event of an action is about.
fn invocation_of(event: &Event) -> Option<InvocationId> {
    match &event.body {
        EventBody::Data(data) => data["invocation_id"].as_str()?.parse().ok(),
        EventBody::Message(_) => None,
    }
}
