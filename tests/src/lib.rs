//! Helpers shared by the acceptance tests, in addition to the testkit.

pub mod access;
pub mod browser;
pub mod calls;
pub mod chaos;
pub mod clients;
pub mod golden;
pub mod memory;
pub mod push_scene;
pub mod raw;
pub mod relayctl;
pub mod room;
pub mod routes;
pub mod signature;
pub mod spawning;
pub mod tcp_client;
