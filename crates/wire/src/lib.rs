//! What clients and nodes see on the network: REST bodies, frames, events. Types and serde only.
//!
//! Requests ignore unknown keys. Answers are supersets that the strictest published client accepts:
//! fields that may be null are there as null, ids are strings, instants have milliseconds.

pub mod action;
pub mod activity;
pub mod agent;
pub mod channel;
pub mod dead_letter;
pub mod delivery;
pub mod dm;
pub mod envelope;
pub mod event;
pub mod field;
pub mod file;
pub mod frame;
pub mod health;
pub mod inbox;
pub mod insight;
pub mod mailbox;
pub mod message;
pub mod node;
pub mod observer;
pub mod operator;
pub mod session_event;
pub mod spawn;
pub mod subscription;
pub mod trigger;
pub mod usage;
pub mod webhook;
pub mod words;
pub mod workspace;
