//! Actions: definitions, invocations with their placement and outcomes, and triggers. Callers: the engine's action,
//! agent and trigger use cases. [`invoke`] creates invocations, [`redispatch`] retries them, [`record_outcomes`] and
//! [`outcomes`] complete them. Main types: `NewInvocation`, `InvokeOutcome`, `Dispatch`, `InvocationOutcome`. What
//! belongs together is written in one transaction.

pub(crate) mod candidates;
pub mod defining;
pub mod definitions;
pub(crate) mod dispatches;
pub(crate) mod invocations;
pub mod invoke;
pub(crate) mod invoke_rows;
pub mod new_invocation;
pub(crate) mod outcome_notices;
pub mod outcomes;
pub(crate) mod placement_turns;
pub(crate) mod record_outcomes;
pub mod redispatch;
pub(crate) mod result_deliveries;
pub mod triggers;
