//! Attacks of one tenant on the others: each is refused, or costs only its own workspace. `cargo xtask attack` runs
//! them.

mod commits;
mod ended_workspaces;
mod former_tokens;
mod revocation;
mod revocation_in_outages;
mod schemas;
mod searches;
