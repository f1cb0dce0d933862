//! Attacks of one tenant on the others: each is refused, or costs only its own workspace. `cargo xtask attack` runs
//! them.

mod commits;
mod large_messages;
mod notices;
mod revocation;
mod schemas;
mod searches;
