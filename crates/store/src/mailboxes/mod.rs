//! Mailboxes of agents: positions, deliveries, claims, settlements, replay, expiry, dead letters and redrives.
//!
//! The main types are [`Delivery`](relay_domain::mailboxes::Delivery), [`cursors::MailboxPosition`] and
//! [`DeliveryReport`](relay_domain::mailboxes::DeliveryReport). Called by `relay_engine`: its mailbox handle,
//! connection serving, http_push and the worker loops.

pub mod attempts;
pub mod changes;
pub mod claims;
pub mod cursors;
pub mod dead_letters;
pub(crate) mod deliveries;
pub(crate) mod delivery_events;
pub mod expiry;
pub mod inbox;
pub mod insight;
pub(crate) mod locked_cursor;
pub(crate) mod positions;
mod redrive_batch;
pub mod redrives;
pub mod replay;
pub(crate) mod retries;
pub(crate) mod settled_floors;
pub(crate) mod settlements;
pub(crate) mod skipped_seqs;
