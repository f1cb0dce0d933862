//! Pace: the moment at which the next message may be typed.
//!
//! [`InjectionGate`] keeps the order and pause between injections, [`Pause`] adapts it to how the agent takes them,
//! and [`OutputHold`] keeps text out of a terminal that is flooded by its program.

mod gate;
mod output_hold;
mod output_rate;
mod pause;

pub use gate::{InjectionGate, InjectionStart, MAX_OUTSTANDING};
pub use output_hold::{CALM_RATE, HOLD_LIMIT, HOLD_RATE, HoldRule, OutputHold, RELEASE_AFTER};
pub use output_rate::OutputRate;
pub use pause::Pause;

#[cfg(test)]
mod tests;
