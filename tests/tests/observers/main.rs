//! Observers: access, streams and resumption.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod console;
mod events;
mod limits;
mod outages;
mod streams;
mod tokens;
mod views;
