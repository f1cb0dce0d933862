//! http_push: health of endpoints, mailbox leases of workers, pages of due deliveries, and recorded attempts. Called by
//! `relay_engine::push`, which the worker's dispatcher calls; [`floors`] and [`record`] write the outcome of attempts
//! in one transaction. Main types: `LeasedMailbox`, `PushPage`, `RecordedAttempts`.

pub mod attempts;
pub mod endpoints;
pub(crate) mod floors;
pub mod mailboxes;
pub mod pages;
pub mod record;
pub mod sweep;
