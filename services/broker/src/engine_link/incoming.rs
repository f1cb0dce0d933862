//! Frames of the engine: replies to requests, messages for agents, invocations.

use relay_wire::nodes::{
    engine_frame::{self, Deliver, EngineFrame, ErrorReply},
    frame::{AgentDeregister, InboundFrame},
    replies::RegisteredAgent,
};
use serde_json::{Map, Value};

use super::{connection::Connection, link::HostRequest, pending::WaitingRequest};
use crate::{
    api::types::Event,
    clock,
    insight::count_dropped,
    mailbox::{FrameAnswer, read_receipt},
    unreadable_json::unreadable,
};

/// Kind of the frame that asks for an agent's position.
const POSITION: &str = "delivery.position";
/// Code of a refusal in place of a reply that cannot be read. Callers may try again.
const UNREADABLE: &str = "reply_unreadable";

impl Connection<'_> {
    pub(super) fn on_text(&mut self, text: &str) -> Result<(), String> {
        match engine_frame::decode(text) {
            Ok(EngineFrame::Deliver(frame)) => self.on_deliver(*frame),
            Ok(EngineFrame::Invoke(invoke)) => {
                // Not waited for: acks, probes and messages share this socket.
                if self.invocations.try_send(*invoke).is_err() {
                    count_dropped("invocations");
                    tracing::warn!("too many invocations wait, one is left to the engine's time-out");
                }
                Ok(())
            }
            Ok(EngineFrame::Reply(reply)) => match self.pending.take_for(&reply) {
                Some(WaitingRequest::Register(waiting)) => {
                    // The registration may have been given up.
                    let _ = waiting.send(Ok(reply.data));
                    Ok(())
                }
                Some(WaitingRequest::Host(request)) => self.on_hosted(*request, reply.data),
                Some(WaitingRequest::Manifest(manifest, waiting)) => {
                    // The engine has kept the socket open and has the node again: it need not close any more.
                    self.renewed_at = None;
                    self.shared.manifest.send_replace(*manifest);
                    let _ = waiting.send(Ok(()));
                    self.announce()
                }
                Some(WaitingRequest::Logged(_)) | None => Ok(()),
            },
            Ok(EngineFrame::Error(error)) => {
                match self.pending.take(&error.id) {
                    Some(WaitingRequest::Register(waiting)) => {
                        let _ = waiting.send(Err(error));
                    }
                    Some(WaitingRequest::Host(request)) => {
                        let _ = request.reply.send(Err(error));
                    }
                    Some(WaitingRequest::Manifest(_, waiting)) => {
                        let _ = waiting.send(Err(error));
                    }
                    Some(WaitingRequest::Logged(kind)) => {
                        tracing::warn!(kind, code = error.code, message = error.message, "the engine refused a frame");
                    }
                    None => tracing::warn!(code = error.code, message = error.message, "the engine reports an error"),
                }
                Ok(())
            }
            Ok(EngineFrame::Ignored { kind }) => {
                tracing::debug!(kind, "frame ignored: not addressed to this node");
                Ok(())
            }
            // The connection stays: the engine would send the same frame on the next one.
            Err(error) => {
                tracing::warn!(error = unreadable(&error), "a frame of the engine cannot be read, it is ignored");
                Ok(())
            }
        }
    }

    fn on_deliver(&mut self, frame: Deliver) -> Result<(), String> {
        let name = frame.agent.clone();
        let mailbox = self.shared.hosted.mailbox(&name);
        if frame.seq == 0 && frame.payload.kind == POSITION {
            // In socket order: everything before it was taken in. Barriers name an agent that does not exist.
            let position = mailbox.map_or(0, |mailbox| mailbox.acked());
            return self.send_ack(&name, position);
        }
        if let Some((event_id, reader)) = read_receipt(&frame)
            && let Some(reader) = self.shared.hosted.mailbox(reader)
        {
            reader.on_read(event_id);
        }
        // Not acknowledged: the message belongs to the node that hosts the agent.
        let Some(mailbox) = mailbox else {
            tracing::warn!(agent.name = name, frame.seq, "a frame is for an agent that is not hosted here");
            return Ok(());
        };
        match mailbox.on_frame(frame, clock::unix_ms()) {
            FrameAnswer::Ack(position) => self.send_ack(&name, position),
            FrameAnswer::Dropped(position) => {
                self.hub.publish(&name, &Event::DeliveryDropped { count: 1, reason: "mailbox_full" });
                self.send_ack(&name, position)
            }
            FrameAnswer::Nothing => Ok(()),
        }
    }

    fn on_hosted(&mut self, request: HostRequest, data: Value) -> Result<(), String> {
        let registered = match read_registered(&request.frame.name, data) {
            Ok(registered) => registered,
            Err(problem) => {
                let message = format!("the reply cannot be read: {problem}");
                let refusal = ErrorReply { id: String::new(), code: UNREADABLE.to_owned(), message };
                // The caller may have given up. The inventory takes the registration back.
                let _ = request.reply.send(Err(refusal));
                return self.announce();
            }
        };
        if request.reply.is_closed() {
            return self.undo_registration(registered.agent_id);
        }
        // Before the next frame is read: it may be the agent's first message.
        let agent = self.shared.host(self.own_agent_id, &request, &registered);
        // The caller may have given up since the check above.
        if request.reply.send(Ok(agent)).is_err() {
            self.shared.hosted.remove(&request.frame.name, &registered.agent_id);
            return self.undo_registration(registered.agent_id);
        }
        Ok(())
    }

    /// The caller has given the registration up.
    fn undo_registration(&mut self, agent_id: String) -> Result<(), String> {
        self.request(
            WaitingRequest::Logged("agent.deregister"),
            &InboundFrame::AgentDeregister(AgentDeregister { agent_id }),
        )
    }
}

/// Reads the reply to the registration of an agent. Some engines leave the name out. Under another name the agent would
/// get no messages.
fn read_registered(name: &str, data: Value) -> Result<RegisteredAgent, String> {
    // A derived implementation takes a list of the values as well.
    let fields = serde_json::from_value::<Map<String, Value>>(data);
    let registered = fields.and_then(|fields| serde_json::from_value::<RegisteredAgent>(fields.into()));
    let registered = registered.map_err(|error| unreadable(&error))?;
    if !registered.name.is_empty() && registered.name != name {
        return Err("it names another agent".to_owned());
    }
    Ok(registered)
}
