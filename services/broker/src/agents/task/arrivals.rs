//! Arriving messages, and the events about them for drivers.

use super::{AgentTask, ProgramRun};
use crate::{
    api::types::{DeliveryRef, Event, PendingMessage},
    injection::DeliveryMode,
    mailbox::Message,
};

/// Why a message waits that came after the agent had asked for its end.
const EXITING: &str = "agent_exiting";

fn mode_hold(mode: DeliveryMode) -> Option<&'static str> {
    (mode == DeliveryMode::ManualFlush).then_some("inbound_delivery_manual_flush")
}

impl AgentTask {
    pub(in crate::agents) fn on_arrived(&self, running: &mut ProgramRun) {
        for message in self.mailbox.fetch() {
            let is_ending = running.wants_end_since.is_some();
            let hold = if is_ending { Some(EXITING) } else { mode_hold(running.pipeline.mode()) };
            self.publish_held_arrival(&message, running.pipeline.mode(), hold);
            running.pipeline.enqueue(message);
        }
        for event_id in self.mailbox.fetch_read() {
            let now = running.tick();
            let effects = running.pipeline.on_read(now, &event_id);
            self.perform(running, effects);
        }
    }

    /// Publishes the arrival of a message.
    pub(in crate::agents) fn publish_arrival(&self, message: &Message, mode: DeliveryMode) {
        self.publish_held_arrival(message, mode, mode_hold(mode));
    }

    /// Publishes the arrival of a message, and the reason for which it waits.
    fn publish_held_arrival(&self, message: &Message, mode: DeliveryMode, hold: Option<&'static str>) {
        let identity = &self.launch.services.identity;
        self.publish(&Event::RelayInbound {
            event_id: message.event_id.clone(),
            from: message.author.name.clone(),
            target: message.target.clone(),
            body: message.body.clone(),
            thread_id: message.thread_id.clone(),
            mode: mode.as_str(),
            injection_mode: message.urgency.as_str(),
            workspace_id: identity.workspace_id.clone(),
            workspace_alias: identity.workspace_alias.clone(),
        });
        self.publish(&Event::DeliveryQueued {
            delivery: reference(message),
            from: hold.map(|_| message.author.name.clone()),
            target: hold.map(|_| message.target.clone()),
            reason: hold,
        });
    }

    /// Takes a failed message out of the dead letters to hand it over again. `None` if it was taken before.
    pub(in crate::agents) fn take_dead_letter(&self, delivery_id: &str) -> Option<Message> {
        let message = self.launch.services.dead_letters.take(delivery_id)?.message;
        let delivery = reference(&message);
        self.publish(&Event::DeliveryQueued { delivery, from: None, target: None, reason: Some("redelivered") });
        Some(message)
    }

    /// Publishes a change of mode, with the number of messages that it releases.
    pub(in crate::agents) fn publish_mode(&self, before: DeliveryMode, mode: DeliveryMode, count: usize) {
        if before == mode {
            return;
        }
        self.publish(&Event::AgentInboundDeliveryModeChanged { previous_mode: before.as_str(), mode: mode.as_str() });
        if mode == DeliveryMode::AutoInject {
            self.publish(&Event::AgentPendingDrained { count, reason: "delivery_mode_transition" });
        }
    }

    pub(in crate::agents) fn to_pending(&self, message: &Message) -> PendingMessage {
        let identity = &self.launch.services.identity;
        PendingMessage {
            from: message.author.name.clone(),
            body: message.body.clone(),
            target: message.target.clone(),
            priority: message.priority,
            mode: message.urgency.as_str(),
            queued_at_ms: message.queued_at_ms,
            event_id: message.event_id.clone(),
            thread_id: message.thread_id.clone(),
            workspace_id: identity.workspace_id.clone(),
            workspace_alias: identity.workspace_alias.clone(),
            delivery_id: message.delivery_id.clone(),
        }
    }
}

pub(in crate::agents) fn reference(message: &Message) -> DeliveryRef {
    DeliveryRef { delivery_id: message.delivery_id.clone(), event_id: message.event_id.clone() }
}
