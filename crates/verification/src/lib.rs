//! Delivery verification: proof that a message typed into an agent's terminal reached the agent.
//!
//! Writing bytes to a terminal proves nothing. This crate judges evidence: the agent's output ([`cleaning`],
//! [`echo`], [`activity`]), files that the agent writes ([`ack_file`]), and signals of other channels. It decides what
//! follows for one injection ([`attempt`]), for one message over all its injections ([`delivery`]) and for the
//! cumulative ack of an agent's mailbox ([`ack_floor`]). [`strategy`] holds the expectations of each agent
//! program, [`pacing`] the time of the next injection, [`sanitise`] the text that may be typed at all.
//!
//! Nothing in here performs I/O, awaits or reads a clock. Bytes, signals and [`Timestamp`]s go in, effects come out,
//! and the caller (the broker) performs them.

pub mod ack_file;
pub mod ack_floor;
pub mod activity;
pub mod attempt;
pub mod channel;
pub mod cleaning;
pub mod delivery;
pub mod echo;
pub mod level;
pub mod pacing;
pub mod sanitise;
pub mod strategy;
pub mod timestamp;

pub use channel::{Channel, RequiredChannels};
pub use level::{Level, Proof};
pub use timestamp::Timestamp;
