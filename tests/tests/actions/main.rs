//! Invocations: placement, handling and outcomes.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod faults;
mod invoking;
mod outcomes;
mod placing;
mod roster;
mod spawn;
mod triggers;
