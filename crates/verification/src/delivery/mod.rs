//! [`Delivery`]: one message for one agent, over all its injections.
//!
//! ```text
//! queued ─▶ injected (attempt 1) ─ signal ─▶ verified ─▶ upgrades
//!              │ time-out                        ▲
//!              ├─ re-injection ─▶ injected (attempt n + 1, same ids)
//!              ├─ not now, or never ─▶ unverified ─▶ closed, or failed after 15 min
//!              └─ attempts used up ─▶ failed           agent ended ─▶ cancelled
//! ```
//!
//! [`DeliveryRules`] state the expectations, an [`AgentCondition`] the visible facts about the agent, and
//! [`DeliveryEffect`]s are the work of the caller.

mod effect;
mod machine;
mod rules;

pub use effect::{DeliveryEffect, FailureReason, UnverifiedReason};
pub use machine::{Delivery, DeliveryState};
pub use rules::{AgentCondition, DeliveryRules, MAX_REINJECTIONS, SETTLED_IDLE, UNVERIFIED_LIMIT, UnverifiedPolicy};

#[cfg(test)]
mod tests;
