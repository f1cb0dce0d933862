//! Tests of the published clients, unmodified.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod broker;
mod broker_spawn;
mod js;
mod python;
mod rust;
