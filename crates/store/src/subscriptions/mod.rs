//! Event subscriptions: [`definitions`] for the REST routes, and [`dispatch`] for the worker that delivers events to their
//! URLs.

pub mod definitions;
pub mod dispatch;
