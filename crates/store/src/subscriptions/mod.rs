//! Event subscriptions: [`definitions`] for the REST routes, [`dispatch`] and [`readers`] for the worker that delivers
//! events to their URLs. Main types: `NewSubscription`, `LeasedSubscription`, `MatchedEvent`.

pub mod definitions;
pub mod dispatch;
pub mod readers;
mod retention;
