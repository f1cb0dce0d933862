//! Tests of the published clients, unmodified.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod broker;
mod broker_spawn;
mod broker_state;
mod gateway_kill;
mod js;
mod postgres_failover;
mod python;
mod refused;
mod rust;
