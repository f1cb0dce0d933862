//! HTTP handlers, one module per noun: parse, one engine call, convert. Registered in `router` and in the OpenAPI
//! document.

pub mod actions;
pub mod agents;
pub mod channels;
pub mod files;
pub mod health;
pub mod mailboxes;
pub mod messages;
pub mod nodes;
pub mod observers;
mod page;
pub mod reference;
pub mod search;
pub mod subscriptions;
pub mod workspaces;
