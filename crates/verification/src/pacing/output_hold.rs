//! [`OutputHold`]: no injection into a terminal that its program floods.

use std::time::Duration;

use super::output_rate::OutputRate;
use crate::{Channel, RequiredChannels, Timestamp};

/// Above this many bytes of cleaned text in a second no injection starts: 32 KiB, ten screens. Our choice.
pub const HOLD_RATE: u64 = 32 * 1024;

/// Below this many bytes in a second an agent is calm: 4 KiB, about one screen. Our choice.
pub const CALM_RATE: u64 = 4 * 1024;

/// The hold ends when the agent has been calm for this long. Our choice.
pub const RELEASE_AFTER: Duration = Duration::from_millis(250);

/// An injection waits this long at most, whatever the rate. Our choice.
pub const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// Respect of an injection for the hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldRule {
    /// A message that waits for its turn.
    Wait,
    /// A message that steers the agent now.
    Skip,
}

/// Follows the output rate of one agent and holds injections while it is high.
#[derive(Debug, Clone, Default)]
pub struct OutputHold {
    rate: OutputRate,
    is_held: bool,
    /// The agent is calm from this instant on, if there is no more output.
    calm_from: Option<Timestamp>,
    injections: u64,
    injections_under_hold: u64,
}

impl OutputHold {
    /// For an agent without output.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `bytes` of cleaned text that were read at `at`. Instants do not decrease.
    pub fn on_output(&mut self, at: Timestamp, bytes: usize) {
        // A hold that is over ends first; otherwise the new `calm_from` below would prolong it.
        self.is_held = self.is_held(at);
        self.rate.record(at, bytes as u64);
        self.is_held |= self.rate.bytes_per_second(at) > HOLD_RATE;
        // `None`, for an agent that is calm, is less than every instant and so does not shorten an earlier one.
        self.calm_from = self.calm_from.max(self.rate.falls_below(CALM_RATE));
    }

    /// Returns `true` while the hold is on: no re-injection, and outstanding echoes get more time.
    pub fn is_held(&self, now: Timestamp) -> bool {
        self.is_held && self.calm_from.is_none_or(|calm_from| now < calm_from + RELEASE_AFTER)
    }

    /// Returns the bytes of cleaned text in the second before `now`.
    pub fn bytes_per_second(&self, now: Timestamp) -> u64 {
        self.rate.bytes_per_second(now)
    }

    /// Returns the instant at which an injection that is ready since `ready_at` may start, if there is no more output.
    /// `None` means at once.
    pub fn opens_at(&self, now: Timestamp, ready_at: Timestamp, rule: HoldRule) -> Option<Timestamp> {
        if rule == HoldRule::Skip || !self.is_held(now) {
            return None;
        }
        let limit = ready_at + HOLD_LIMIT;
        let released_at = self.calm_from.map_or(limit, |calm_from| calm_from + RELEASE_AFTER);
        Some(released_at.min(limit)).filter(|opens_at| now < *opens_at)
    }

    /// Notes that an injection starts.
    pub fn injected(&mut self, at: Timestamp) {
        self.injections += 1;
        if self.is_held(at) {
            self.injections_under_hold += 1;
        }
    }

    /// Returns the channel that normally comes first for this agent: that of its strategy, or MCP or file if most
    /// injections were made under the hold, where an echo is hard to find. A figure only.
    pub fn primary_channel(&self, strategy: Channel, required: RequiredChannels) -> Channel {
        if self.injections_under_hold * 2 <= self.injections {
            strategy
        } else if required.mcp {
            Channel::Mcp
        } else {
            Channel::File
        }
    }
}
