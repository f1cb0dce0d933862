//! Event subscriptions: their definitions.

pub mod calls;
pub mod definitions;
