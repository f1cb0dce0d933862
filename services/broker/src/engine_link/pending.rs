//! Requests on one connection that wait for their reply.

use std::collections::BTreeMap;

use relay_wire::nodes::engine_frame::{ErrorReply, Reply};
use serde_json::Value;
use tokio::sync::oneshot;

use super::{link::HostRequest, manifest::Manifest};
use crate::insight::count_dropped;

/// Maximum number of waiting requests. An engine that answers none would fill the memory.
const MAX_WAITING: usize = 1024;

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

/// Waiting requests by their number.
#[derive(Debug, Default)]
pub(super) struct PendingRequests {
    waiting: BTreeMap<u64, WaitingRequest>,
    next_id: u64,
}

impl PendingRequests {
    /// Adds a request and returns its id. If there are too many, the oldest is given up, and with it only a line in the
    /// log as long as there is one of that kind.
    pub(super) fn add(&mut self, waiting: WaitingRequest) -> String {
        self.next_id += 1;
        if self.waiting.len() >= MAX_WAITING {
            let logged = self.waiting.iter().find(|(_, waiting)| matches!(waiting, WaitingRequest::Logged(_)));
            // A caller whose request is given up sees its reply dropped; the registration of an agent is then repeated.
            let oldest = logged.or_else(|| self.waiting.first_key_value()).map(|(number, _)| *number);
            oldest.map(|number| self.waiting.remove(&number));
            count_dropped("engine_replies");
        }
        self.waiting.insert(self.next_id, waiting);
        format!("b{}", self.next_id)
    }

    /// Takes the request that a reply is for. Some engines leave the id out of a registration's reply.
    pub(super) fn take_for(&mut self, reply: &Reply) -> Option<WaitingRequest> {
        if !reply.id.is_empty() {
            return self.take(&reply.id);
        }
        let name = reply.data["name"].as_str()?;
        let is_for =
            |waiting: &WaitingRequest| matches!(waiting, WaitingRequest::Host(request) if request.frame.name == name);
        let number = *self.waiting.iter().find(|(_, waiting)| is_for(waiting))?.0;
        self.waiting.remove(&number)
    }

    /// Takes the request of an id.
    pub(super) fn take(&mut self, id: &str) -> Option<WaitingRequest> {
        self.waiting.remove(&id.strip_prefix('b')?.parse().ok()?)
    }

    /// Requests that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use relay_wire::nodes::frame::AgentRegister;
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_are_found_by_their_id_and_the_oldest_without_a_caller_is_given_up() {
        let mut pending = PendingRequests::default();
        let (reply, _answer) = oneshot::channel();
        assert_eq!(pending.add(WaitingRequest::Register(reply)), "b1");
        for _ in 0..MAX_WAITING {
            pending.add(WaitingRequest::Logged("inventory.sync"));
        }
        assert_eq!(pending.len(), MAX_WAITING);
        assert!(pending.take("b2").is_none() && pending.take("other").is_none());
        assert!(pending.take("b1").is_some() && pending.take("b1").is_none());
    }

    #[test]
    fn only_a_reply_without_an_id_is_found_by_its_name() {
        let mut pending = PendingRequests::default();
        let (reply, _answer) = oneshot::channel();
        let frame = AgentRegister {
            name: "ada".into(),
            invocation_id: None,
            session_ref: None,
            resumable: None,
            auto_join_general: None,
        };
        pending.add(WaitingRequest::Host(Box::new(HostRequest { frame, had: Vec::new(), reply })));
        let reply = |id: &str| Reply { id: id.to_owned(), data: json!({ "name": "ada" }) };
        for foreign in ["b2", "other", " "] {
            assert!(pending.take_for(&reply(foreign)).is_none(), "{foreign}");
        }
        assert!(pending.take_for(&reply("")).is_some());
    }
}
