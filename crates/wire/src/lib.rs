//! Wire formats: REST bodies, frames and events. Types and serde only.
//!
//! Requests ignore unknown keys. Responses are supersets that the strictest published client accepts: nullable fields
//! are present as null, ids are strings, instants have milliseconds.

#![warn(missing_docs)]

pub mod actions;
pub mod agents;
pub mod channels;
pub mod envelope;
pub mod events;
pub mod field;
pub mod files;
pub mod mailboxes;
pub mod messages;
pub mod nodes;
pub mod observers;
pub mod rights;
pub mod search;
pub mod subscriptions;
pub mod words;
pub mod workspaces;
