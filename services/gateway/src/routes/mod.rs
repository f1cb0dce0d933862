//! Handlers, one file per noun: parse, one engine call, convert.

pub mod actions;
pub mod activity;
pub mod agents;
pub mod channels;
pub mod dead_letters;
pub mod deliveries;
pub mod dms;
pub mod files;
pub mod health;
pub mod inbox;
pub mod insight;
pub mod mailboxes;
pub mod messages;
pub mod nodes;
pub mod observer_tokens;
pub mod operator;
mod page;
pub mod reference;
pub mod send;
pub mod session_events;
pub mod spawn;
pub mod subscriptions;
pub mod triggers;
pub mod usage;
pub mod webhooks;
pub mod workspaces;
