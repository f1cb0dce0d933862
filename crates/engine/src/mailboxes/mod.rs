//! Mailboxes: serving them on sockets, listing and settling deliveries, claims and dead letters.

pub mod claims;
pub(crate) mod cursors;
pub mod dead_letters;
pub mod deliveries;
pub mod expiry;
pub mod inbox;
pub mod insight;
pub mod positions;
pub mod redrives;
pub mod serving;
