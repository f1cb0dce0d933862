//! Crashes, cuts and restarts: nothing is lost, and nothing comes out of order.

mod delivery;
mod outages;
mod push;
mod rolling;
mod storm;
mod takeover;
