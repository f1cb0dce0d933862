//! Requests on one connection that wait for their reply.

use std::collections::HashMap;

use relay_wire::nodes::engine_frame::{ErrorReply, Reply};
use serde_json::Value;
use tokio::sync::oneshot;

use super::{link::HostRequest, manifest::Manifest};

/// Request that waits.
#[derive(Debug)]
pub(super) enum WaitingRequest {
    /// Registration of the node.
    Register(oneshot::Sender<Result<Value, ErrorReply>>),
    /// Registration of an agent.
    Host(Box<HostRequest>),
    /// Registration of the node with another manifest.
    Manifest(Box<Manifest>, oneshot::Sender<Result<(), ErrorReply>>),
    /// A request whose answer is only logged.
    Logged(&'static str),
}

/// Waiting requests by id.
#[derive(Debug, Default)]
pub(super) struct PendingRequests {
    waiting: HashMap<String, WaitingRequest>,
    next_id: u64,
}

impl PendingRequests {
    /// Adds a request and returns its id.
    pub(super) fn add(&mut self, waiting: WaitingRequest) -> String {
        self.next_id += 1;
        let id = format!("b{}", self.next_id);
        self.waiting.insert(id.clone(), waiting);
        id
    }

    /// Takes the request that a reply is for. Some engines leave the id out of a registration's reply.
    pub(super) fn take_for(&mut self, reply: &Reply) -> Option<WaitingRequest> {
        if let Some(found) = self.waiting.remove(&reply.id) {
            return Some(found);
        }
        let name = reply.data["name"].as_str()?;
        let is_for =
            |waiting: &WaitingRequest| matches!(waiting, WaitingRequest::Host(request) if request.frame.name == name);
        let id = self.waiting.iter().find(|(_, waiting)| is_for(waiting)).map(|(id, _)| id.clone())?;
        self.waiting.remove(&id)
    }

    /// Takes the request of an id.
    pub(super) fn take(&mut self, id: &str) -> Option<WaitingRequest> {
        self.waiting.remove(id)
    }
}
