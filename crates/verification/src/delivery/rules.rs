//! [`DeliveryRules`] and [`AgentCondition`]: the facts that decide about a delivery.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::attempt::AttemptRules;
use crate::{Level, Timestamp};

/// Re-injections of one message where the strategy allows them: four writes in all. From the proposal that this
/// verification implements; the conditions of [`AgentCondition::allows_reinjection`] make them rare.
pub const MAX_REINJECTIONS: u32 = 3;

/// An agent that rests at its prompt for this long after the write has taken the message out of its input box.
/// Our choice.
pub const SETTLED_IDLE: Duration = Duration::from_secs(10);

/// A delivery that is unverified for this long fails. Longer than most turns of an agent, short enough that a sender
/// hears of the failure. Our choice.
pub const UNVERIFIED_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Treatment of a delivery without a signal whose message may not be typed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnverifiedPolicy {
    /// The delivery is closed at the end of the attempt: nothing could ever confirm it.
    Written,
    /// The delivery is closed when the agent rests at its prompt, or by a late ack. For agents whose echo is not
    /// reliable.
    Settled,
    /// Only a signal closes the delivery.
    Strict,
    /// The delivery fails. If its message could be typed again, only not now, it waits as with [`Self::Settled`].
    Failed,
}

/// Expectations of one delivery. Made by [`Strategy::rules`](crate::strategy::Strategy::rules).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryRules {
    /// The rules of each attempt.
    pub attempt: AttemptRules,
    /// Upper bound of re-injections, 0 to [`MAX_REINJECTIONS`].
    pub max_reinjections: u32,
    /// Treatment of silence.
    pub policy: UnverifiedPolicy,
    /// The level at which the message is verified: [`Level::Echoed`], or [`Level::InContext`] for messages of high
    /// priority where the operator demands it.
    pub minimum: Level,
}

/// The parts of an agent's condition on which it depends whether a message may be typed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentCondition {
    /// The agent's program echoes reliably: by the strategy, and not learned otherwise.
    pub is_echo_reliable: bool,
    /// Since when the harness's prompt is on the screen and the agent rests; `None` if it does not.
    pub at_prompt_since: Option<Timestamp>,
    /// The output rate is above the threshold of the hold.
    pub is_output_held: bool,
    /// The screen shows the event id, or a folded paste that came after the injection: the message may well be there.
    pub is_message_visible: bool,
    /// The terminal takes no input.
    pub is_write_stalled: bool,
}

impl AgentCondition {
    /// Returns `true` if a line typed now would be visible, and none of the signs of the message is. A copy costs more
    /// than a missing echo: agents act twice. That made the published broker give re-injection up.
    pub fn allows_reinjection(&self) -> bool {
        self.is_echo_reliable
            && self.at_prompt_since.is_some()
            && !self.is_output_held
            && !self.is_message_visible
            && !self.is_write_stalled
    }

    /// Returns the instant at which the agent has rested at its prompt for [`SETTLED_IDLE`] since `entered_at`; `None`
    /// if it does not rest.
    pub(super) fn settled_at(&self, entered_at: Timestamp) -> Option<Timestamp> {
        Some(self.at_prompt_since?.max(entered_at) + SETTLED_IDLE)
    }
}
