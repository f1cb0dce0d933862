//! Crashes, network faults and restarts: nothing is lost, and nothing is reordered.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod delivery;
mod failover;
mod outages;
mod push;
mod rolling;
mod returns;
mod storm;
mod takeover;
