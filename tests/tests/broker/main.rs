//! Our broker with fake agents, against a real engine: the way of a message, the listen API, restarts.

mod api;
mod delivery;
mod faults;
mod harness;
mod packages;
mod restart;
mod runner;
mod scene;
mod transcript;
