//! A broker (`agent-relay-broker`) as a process, used through its listen API, and the fake agents in its terminals.
//! Main types: [`NodeBroker`] and [`FakeAgent`]. Used by tests, by `cargo xtask node` and by the load generator.

mod broker;
mod fake_agent;

pub use broker::{BrokerSpec, NodeBroker};
pub use fake_agent::FakeAgent;
