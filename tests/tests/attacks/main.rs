//! Attacks of one tenant on the others: each is refused, or costs only its own workspace. `cargo xtask attack` runs
//! them.

mod amplification;
mod commits;
mod connections;
mod large_messages;
mod names;
mod nats;
mod notices;
mod observer_tokens;
mod plans;
mod revocation;
mod schemas;
mod searches;
mod statements;
mod transfers;
mod unknown_tokens;
