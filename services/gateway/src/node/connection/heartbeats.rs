//! Heartbeats of a connection: they keep its provider live, and may declare another name, capabilities, limit or
//! version.
//!
//! The load is recorded at once. What has changed is recorded after a check of the token, in the order of the requests:
//! one change at a time, and later ones are merged meanwhile.

use relay_domain::{
    JsonText,
    names::{MAX_NODE_NAME_BYTES, MAX_NOTE_BYTES, check_length},
};
use relay_engine::mailboxes::serving::Heartbeat;
use relay_wire::nodes::frame::{self, Capability, InboundFrame};

use super::{
    control::{self, Request},
    effects::Effect,
    state::ConnectionState,
};
use crate::connections::FrameMemory;

/// Properties of the node and its provider that heartbeats declare beside their load.
#[derive(Debug, Default, PartialEq)]
struct Declaration {
    name: Option<String>,
    capabilities: Option<Vec<Capability>>,
    max_agents: Option<u32>,
    version: Option<String>,
}

impl Declaration {
    /// Takes the declaration out of a heartbeat. A name that no node can have is left out.
    fn take_from(beat: &mut frame::Heartbeat) -> Self {
        Self {
            name: beat.name.take().filter(|name| name.len() <= MAX_NODE_NAME_BYTES),
            capabilities: beat.capabilities.take(),
            max_agents: beat.max_agents.take(),
            version: beat.version.take(),
        }
    }

    /// Adds it to a heartbeat without one.
    fn add_to(self, beat: frame::Heartbeat) -> frame::Heartbeat {
        let Self { name, capabilities, max_agents, version } = self;
        frame::Heartbeat { name, capabilities, max_agents, version, ..beat }
    }

    /// Keeps what `later` leaves out.
    fn merge(&mut self, later: Self) {
        *self = Self {
            name: later.name.or(self.name.take()),
            capabilities: later.capabilities.or(self.capabilities.take()),
            max_agents: later.max_agents.or(self.max_agents),
            version: later.version.or(self.version.take()),
        };
    }
}

/// Declarations of a connection's heartbeats.
#[derive(Default)]
pub(super) struct DeclaredChanges {
    /// Not recorded yet.
    waiting: Declaration,
    /// Memory of the frame with the waiting capabilities.
    memory: Option<FrameMemory>,
    /// An earlier change waits for the check of the token.
    is_in_progress: bool,
    /// The limit and the version that were recorded last.
    recorded: (Option<u32>, Option<String>),
    /// The newest heartbeat, without a declaration.
    newest: Option<frame::Heartbeat>,
}

impl DeclaredChanges {
    /// Forgets the limit and the version, which a registration replaces.
    pub(super) fn forget_recorded(&mut self) {
        self.recorded = (None, None);
    }
}

impl ConnectionState {
    /// Handles a heartbeat.
    pub(super) fn on_heartbeat(&mut self, id: Option<&str>, mut beat: frame::Heartbeat, memory: Option<FrameMemory>) {
        if beat.node_id.as_ref().is_some_and(|node| *node != self.node.node_id.as_str()) {
            return self.refuse(id, "node_id_mismatch", "node_id is not this connection's node");
        }
        if let Err(error) = control::check_capabilities(beat.capabilities.as_deref().unwrap_or_default()) {
            return self.refuse(id, "invalid_message", &error.to_string());
        }
        let version = beat.version.as_deref().unwrap_or_default();
        if let Err(error) = check_length("version", version, MAX_NOTE_BYTES) {
            return self.refuse(id, "invalid_message", &error.to_string());
        }
        // A heartbeat before the registration has been handled is early, not invalid.
        if self.binding.is_none() {
            return;
        }
        let declared = Declaration::take_from(&mut beat);
        // Only capabilities are large. Their memory is held until the change has been handled.
        if declared.capabilities.is_some() {
            self.changes.memory = memory;
        }
        self.changes.waiting.merge(declared);
        self.changes.newest = Some(beat.clone());
        self.record_heartbeat(beat);
        self.request_change();
    }

    /// Requests the check of the token for declarations that differ from the recorded ones.
    pub(super) fn request_change(&mut self) {
        let (Some(binding), Some(newest)) = (&self.binding, &self.changes.newest) else { return };
        // The end of a change requests the next one; after a failed check the next heartbeat does.
        if self.changes.is_in_progress {
            return;
        }
        let mut changed = std::mem::take(&mut self.changes.waiting);
        let (max_agents, version) = &self.changes.recorded;
        // Only a change renames the node: an operator's new name is not undone by heartbeats that repeat the old one.
        changed.name = changed.name.filter(|name| *name != binding.declared_name);
        // A repetition changes nothing, and each change costs a check of the token.
        changed.max_agents = changed.max_agents.filter(|most| Some(*most) != *max_agents);
        changed.version = changed.version.filter(|newer| Some(newer) != version.as_ref());
        if changed == Declaration::default() {
            return;
        }
        let frame = InboundFrame::Heartbeat(Box::new(changed.add_to(newest.clone())));
        self.changes.is_in_progress = true;
        self.requests.push(Request { id: None, frame, memory: self.changes.memory.take() });
        self.start_requests();
    }

    /// Records a change whose token is valid, beside the newest load.
    pub(super) fn on_change_checked(&mut self, mut beat: frame::Heartbeat) {
        self.changes.is_in_progress = false;
        let (Some(binding), Some(newest)) = (&mut self.binding, &self.changes.newest) else { return };
        let changed = Declaration::take_from(&mut beat);
        let (max_agents, version) = &mut self.changes.recorded;
        if let Some(name) = &changed.name {
            binding.declared_name.clone_from(name);
        }
        *max_agents = changed.max_agents.or(*max_agents);
        if changed.version.is_some() {
            version.clone_from(&changed.version);
        }
        let beat = changed.add_to(newest.clone());
        self.record_heartbeat(beat);
    }

    /// Keeps a change whose token could not be checked for the next heartbeat, unless a newer one replaces it.
    pub(super) fn on_change_unchecked(&mut self, mut beat: frame::Heartbeat) {
        self.changes.is_in_progress = false;
        let mut unchecked = Declaration::take_from(&mut beat);
        // The waiting declarations are newer.
        unchecked.merge(std::mem::take(&mut self.changes.waiting));
        self.changes.waiting = unchecked;
    }

    /// Records a heartbeat.
    fn record_heartbeat(&mut self, beat: frame::Heartbeat) {
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
            capabilities: beat
                .capabilities
                .as_deref()
                .map(|list| JsonText::encode(&control::stored_capabilities(list))),
        };
        self.emit(Effect::Heartbeat(Box::new(beat)));
    }
}
