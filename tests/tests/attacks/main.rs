//! Attacks of one tenant on the others: each is refused, or costs only its own workspace. `cargo xtask attack` runs
//! them.

mod amplification;
mod bodies;
mod claims;
mod commits;
mod connections;
mod ended_workspaces;
mod frames;
mod invocations;
mod large_messages;
mod listings;
mod names;
mod nats;
mod notices;
mod observers;
mod plans;
mod providers;
mod revocation;
mod schemas;
mod shares;
mod statements;
mod transfers;
mod triggers;
mod unknown_tokens;
