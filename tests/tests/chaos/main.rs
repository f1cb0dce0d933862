//! Crashes, network faults and restarts: nothing is lost, and nothing is reordered.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod dead_network;
mod delivery;
mod failover;
mod failover_push;
mod fanouts;
mod nats_cluster;
mod outages;
mod patroni;
mod pooler;
mod push;
mod push_positions;
mod repairer;
mod returns;
mod rolling;
mod storm;
mod takeover;
