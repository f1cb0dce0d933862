//! Addresses: the name of an agent and its location, as `name@machine`.

use relay_domain::{
    WorkspaceScope,
    agents::DIRECT_MACHINE,
    names::{MAX_AGENT_NAME_BYTES, MAX_NODE_NAME_BYTES, check_name},
};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::{callers::AgentCaller, idempotency::ClientKey},
    error::{InvalidInput, Missing},
    messages::posting::{Draft, PostedMessage, Sender, Target},
};

/// Bound of the signs `@` in an address.
const MAX_SIGNS: usize = 8;

/// Recipient of a message to an address.
pub(super) enum AddressedPost {
    /// Agent of this name.
    To(String),
    /// The message was sent by an earlier request.
    Sent(Box<PostedMessage>),
}

impl Messages {
    /// Sends a direct message to the agent of an address: `name@direct` for one on its own node, else the name of its
    /// node or the id of the machine.
    ///
    /// # Errors
    /// As for posting; [`InvalidInput::Address`], [`Missing::Address`],
    /// [`InvalidInput::AmbiguousAddress`] when the machine names one node and the machine id of others, or when names
    /// that contain `@` permit two readings.
    pub async fn send_to_address(
        &self,
        caller: &AgentCaller,
        address: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        match self.resolve_address(&caller.into(), address, key.as_ref()).await? {
            AddressedPost::To(name) => self.post(caller, Target::Agent(name), draft, key).await,
            AddressedPost::Sent(sent) => Ok(*sent),
        }
    }

    /// Returns the agent of an address, or the message that was sent to it under this key.
    pub(super) async fn resolve_address(
        &self,
        sender: &Sender,
        address: &str,
        key: Option<&ClientKey>,
    ) -> EngineResult<AddressedPost> {
        let readings = read_address(address);
        if readings.is_empty() {
            return Err(EngineError::Invalid(InvalidInput::Address));
        }
        let error = match self.resolve_readings(sender.scope, &readings).await {
            Ok(name) => return Ok(AddressedPost::To(name)),
            Err(error) => error,
        };
        // A message sent under this key stays sent, even if its recipient has moved since.
        for (name, _) in readings {
            let target = Target::Agent(name.to_owned());
            if let Some(sent) = self.find_repeated_post(sender, &target, key).await? {
                return Ok(AddressedPost::Sent(Box::new(sent)));
            }
        }
        Err(error)
    }

    /// Returns the name of the only agent that is where a reading of its address says.
    async fn resolve_readings(&self, scope: WorkspaceScope, readings: &[(&str, &str)]) -> EngineResult<String> {
        let found = self.core.store.addressed_agents(scope, readings).await?;
        let (mut resolved, mut is_ambiguous) = (None, false);
        for agent in found {
            if agent.machine == DIRECT_MACHINE && agent.is_direct || agent.matches && !agent.is_ambiguous {
                is_ambiguous |= resolved.replace(agent.name).is_some();
            } else {
                is_ambiguous |= agent.is_ambiguous;
            }
        }
        match resolved {
            _ if is_ambiguous => Err(EngineError::Invalid(InvalidInput::AmbiguousAddress)),
            Some(name) => Ok(name),
            None => Err(EngineError::NotFound(Missing::Address)),
        }
    }
}

/// Returns the readings of an address as the name of an agent and a machine. Both may contain `@`, so each `@` may be
/// the one between them.
fn read_address(address: &str) -> Vec<(&str, &str)> {
    let address = address.strip_prefix('@').unwrap_or(address);
    let signs = address.match_indices('@').map(|(at, _)| at);
    let readings = signs.take(MAX_SIGNS).map(|at| (&address[..at], &address[at + 1..]));
    readings
        .filter(|(name, machine)| {
            check_name("address", name, MAX_AGENT_NAME_BYTES).is_ok()
                && check_name("address", machine, MAX_NODE_NAME_BYTES).is_ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_name_and_a_place() {
        for (address, expected) in [
            ("bob@direct", vec![("bob", "direct")]),
            ("@bob@box-a", vec![("bob", "box-a")]),
            ("bob@home@box-a", vec![("bob", "home@box-a"), ("bob@home", "box-a")]),
            ("bob", vec![]),
            ("@bob", vec![]),
            ("bob@", vec![]),
            ("@direct", vec![]),
            ("b\0b@direct", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(read_address(address), expected, "{address:?}");
        }
        assert_eq!(read_address(&"a@".repeat(1000)).len(), 0, "too long");
        assert_eq!(read_address(&"a@".repeat(20)).len(), MAX_SIGNS);
    }
}
