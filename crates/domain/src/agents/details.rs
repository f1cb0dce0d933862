//! [`AgentDetails`]: an agent with its channels, actions and open deliveries. Read by the store, shown by the gateway.

use std::fmt;

use super::Agent;
use crate::{AgentId, channels::Membership, mailboxes::Delivery};

/// Agent with what depends on it.
#[derive(Debug)]
pub struct AgentDetails {
    pub agent: Agent,
    /// Channels that it is a member of, oldest first, without conversations.
    pub channels: Vec<Membership>,
    /// Names of the actions that it handles.
    pub actions_provided: Vec<String>,
    /// Names of the actions that it may invoke.
    pub actions_available: Vec<String>,
    /// Its oldest unsettled deliveries, without texts.
    pub pending_deliveries: Vec<Delivery>,
}

/// Key by which an agent is looked up.
#[derive(Debug, Clone, Copy)]
pub enum AgentKey<'a> {
    Id(AgentId),
    Name(&'a str),
}

impl fmt::Display for AgentKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}
