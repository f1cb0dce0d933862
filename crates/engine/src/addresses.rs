//! Addresses: an agent's name and where it is, as `name@machine`.

use relay_domain::names::{MAX_AGENT_NAME_BYTES, MAX_NODE_NAME_BYTES, check_name};

use crate::{
    Engine, EngineError, EngineResult,
    auth::AgentCaller,
    idempotency::ClientKey,
    send::{Draft, Posted},
};

/// What an agent's own node is called in addresses.
const DIRECT: &str = "direct";

impl Engine {
    /// Sends a direct message to the agent of an address: `name@direct` for one on its own node, else the
    /// name of its node or the id of the machine.
    ///
    /// # Errors
    /// As for posting; [`EngineError::InvalidAddress`], [`EngineError::AddressNotFound`],
    /// [`EngineError::AmbiguousAddress`] when the word names one node and the machine of others.
    pub async fn send_to_address(
        &self,
        caller: &AgentCaller,
        address: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        let (name, machine) = split(address).ok_or(EngineError::InvalidAddress)?;
        match self.check_whereabouts(caller, name, machine).await {
            Ok(()) => self.send_dm(caller, name, draft, key).await,
            // What was sent under this key stays sent, wherever its recipient is now.
            Err(error) => self.sent_before(caller, name, key.as_ref()).await?.ok_or(error),
        }
    }

    async fn check_whereabouts(&self, caller: &AgentCaller, name: &str, machine: &str) -> EngineResult<()> {
        let found = self.store().whereabouts(caller.scope, name, machine).await?;
        let found = found.ok_or(EngineError::AddressNotFound)?;
        if machine == DIRECT && found.direct {
            return Ok(());
        }
        if found.ambiguous {
            return Err(EngineError::AmbiguousAddress);
        }
        if found.there { Ok(()) } else { Err(EngineError::AddressNotFound) }
    }
}

/// The agent's name and the place. Names may contain an `@`; places are taken from the last one on.
fn split(address: &str) -> Option<(&str, &str)> {
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
            assert_eq!(split(address), expected, "{address:?}");
        }
    }
}
