//! Heartbeats of a connection: they keep its provider live, and may change the node's name and capabilities.

use relay_domain::names::{MAX_NOTE_BYTES, check_length};
use relay_engine::mailboxes::serving::Heartbeat;
use relay_wire::nodes::frame::{self, InboundFrame};

use super::{
    control::{self, Request},
    effects::Effect,
    state::ConnectionState,
};
use crate::connections::FrameMemory;

impl ConnectionState {
    /// Handles a heartbeat. One that changes the node waits in the queue of requests, until the token was checked.
    pub(super) fn on_heartbeat(
        &mut self,
        id: Option<String>,
        mut beat: Box<frame::Heartbeat>,
        memory: Option<FrameMemory>,
    ) {
        if beat.node_id.as_ref().is_some_and(|node| *node != self.node.node_id.as_str()) {
            return self.refuse(id.as_deref(), "node_id_mismatch", "node_id is not this connection's node");
        }
        if let Err(error) = control::check_capabilities(beat.capabilities.as_deref().unwrap_or_default()) {
            return self.refuse(id.as_deref(), "invalid_message", &error.to_string());
        }
        let version = beat.version.as_deref().unwrap_or_default();
        if let Err(error) = check_length("version", version, MAX_NOTE_BYTES) {
            return self.refuse(id.as_deref(), "invalid_message", &error.to_string());
        }
        // A heartbeat before the registration has been handled is early, not invalid.
        let Some(binding) = &mut self.binding else { return };
        // Only a change renames the node: an operator's new name is not undone by heartbeats that repeat the old one.
        beat.name = beat.name.filter(|name| *name != binding.declared_name);
        if let Some(name) = &beat.name {
            binding.declared_name.clone_from(name);
        }
        if beat.name.is_none() && beat.capabilities.is_none() {
            return self.record_heartbeat(*beat);
        }
        // Only a token that is still accepted may change the node. The other heartbeats must not wait behind requests:
        // they keep the node alive.
        self.requests.push(Request { id, frame: InboundFrame::Heartbeat(beat), memory });
        self.start_requests();
    }

    /// Records a heartbeat whose name, if any, is another one than before.
    pub(super) fn record_heartbeat(&mut self, beat: frame::Heartbeat) {
        let Some(binding) = &self.binding else { return };
        let fence = &binding.fence;
        let beat = Heartbeat {
            scope: fence.scope,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            epoch: fence.epoch,
            load: beat.load.unwrap_or_default().clamp(0.0, 1.0),
            // Providers that do not measure their load send 0.
            load_measured: beat.load_reported.unwrap_or(beat.load.is_some_and(|load| load > 0.0)),
            active_agents: i32::try_from(beat.active_agents).unwrap_or(i32::MAX),
            max_agents: beat.max_agents.map(|most| i32::try_from(most).unwrap_or(i32::MAX)),
            version: beat.version,
            node_name: beat.name,
            handlers_live: beat.handlers_live,
            capabilities: beat.capabilities.as_deref().map(control::stored_capabilities),
        };
        self.emit(Effect::Heartbeat(Box::new(beat)));
    }
}
