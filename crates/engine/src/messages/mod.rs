//! Messages: posting, the group committer, publishing, reading, editing, reactions and webhooks.

pub(crate) mod committer;
pub(crate) mod draft;
pub mod edits;
pub mod history;
pub mod outbox_relay;
pub mod posting;
pub(crate) mod publisher;
pub mod reactions;
pub mod read_models;
pub mod receipts;
pub mod webhooks;
