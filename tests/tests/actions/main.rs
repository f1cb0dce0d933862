//! Invocations: placed on nodes, handled, and told of.

mod faults;
mod invoking;
mod outcomes;
mod placing;
mod roster;
mod spawn;
mod triggers;
