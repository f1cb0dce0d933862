//! Event subscriptions: their definitions.

pub mod definitions;
