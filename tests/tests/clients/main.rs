//! The published clients, unmodified.

mod broker;
mod broker_spawn;
mod js;
mod python;
mod rust;
