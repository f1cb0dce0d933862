//! The REST API, route by route, and properties of all routes.

mod activity;
mod batches;
mod files;
mod idempotency;
mod inbox;
mod insight;
mod limits;
mod messages;
mod nodes;
mod rate_limits;
mod reactions;
mod search;
mod sessions;
mod subscriptions;
mod tenancy;
mod webhooks;
