//! Addresses: the name of an agent and its location, as `name@machine`.

use relay_domain::names::{MAX_AGENT_NAME_BYTES, MAX_NODE_NAME_BYTES, check_name};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::{authentication::AgentCaller, idempotency::ClientKey},
    error::{InvalidInput, Missing},
    messages::posting::{Draft, PostedMessage, Target},
};

/// Machine of an agent's own node.
const DIRECT: &str = "direct";

impl Messages {
    /// Sends a direct message to the agent of an address: `name@direct` for one on its own node, else the name of its
    /// node or the id of the machine.
    ///
    /// # Errors
    /// As for posting; [`InvalidInput::Address`], [`Missing::Address`],
    /// [`InvalidInput::AmbiguousAddress`] when the machine names one node and the machine id of others.
    pub async fn send_to_address(
        &self,
        caller: &AgentCaller,
        address: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let (name, machine) = split_address(address).ok_or(EngineError::Invalid(InvalidInput::Address))?;
        let target = Target::Agent(name.to_owned());
        match self.check_location(caller, name, machine).await {
            Ok(()) => self.post(caller, target, draft, key).await,
            // A message sent under this key stays sent, even if its recipient has moved since.
            Err(error) => self.find_repeated_post(&caller.into(), &target, key.as_ref()).await?.ok_or(error),
        }
    }

    async fn check_location(&self, caller: &AgentCaller, name: &str, machine: &str) -> EngineResult<()> {
        let found = self.core.store.agent_location(caller.scope, name, machine).await?;
        let found = found.ok_or(EngineError::NotFound(Missing::Address))?;
        if machine == DIRECT && found.is_direct {
            return Ok(());
        }
        if found.is_ambiguous {
            return Err(EngineError::Invalid(InvalidInput::AmbiguousAddress));
        }
        if found.matches { Ok(()) } else { Err(EngineError::NotFound(Missing::Address)) }
    }
}

/// Splits an address into the agent's name and the machine. Names may contain an `@`; machines may not.
fn split_address(address: &str) -> Option<(&str, &str)> {
    let address = address.strip_prefix('@').unwrap_or(address);
    let (name, machine) = address.rsplit_once('@')?;
    check_name("address", name, MAX_AGENT_NAME_BYTES).ok()?;
    check_name("address", machine, MAX_NODE_NAME_BYTES).ok()?;
    Some((name, machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_name_and_a_place() {
        for (address, expected) in [
            ("bob@direct", Some(("bob", "direct"))),
            ("@bob@box-a", Some(("bob", "box-a"))),
            ("bob@home@box-a", Some(("bob@home", "box-a"))),
            ("bob", None),
            ("@bob", None),
            ("bob@", None),
            ("@direct", None),
            ("b\0b@direct", None),
            ("", None),
        ] {
            assert_eq!(split_address(address), expected, "{address:?}");
        }
    }
}
