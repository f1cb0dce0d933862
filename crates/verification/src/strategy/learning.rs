//! [`Learned`]: conclusions about an agent program from the deliveries so far.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::channel::{ECHO_PATIENCE, SIGNAL_WINDOW};

/// Number of deliveries with an ack of level 2 and no echo after which the echo is unreliable, and of echoes in a row
/// after which it is reliable again. From the proposal.
const ECHO_EVIDENCE: u32 = 20;

/// Deliveries over which the share of file acks is taken. From the proposal.
const FILE_ACK_SAMPLE: usize = 500;

/// Above this share of file acks, in per cent, the echo window shrinks. From the proposal.
const SHRINK_ABOVE_PERCENT: usize = 90;

/// Below this share of file acks, in per cent, the echo window is as long as for everyone. From the proposal.
const RESTORE_BELOW_PERCENT: usize = 80;

/// The echo window of programs that confirm nearly everything by file. From the proposal.
pub const SHORT_ECHO_WINDOW: Duration = Duration::from_secs(5);

/// Conclusions about one agent program in one version, or about one running agent of a program without an entry.
///
/// Serialised to be kept over restarts; 500 flags and four figures.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Learned {
    is_echo_unreliable: bool,
    has_short_echo_window: bool,
    /// Deliveries with an ack of level 2 and no echo, since the echo was last found reliable.
    missing_echoes: u32,
    /// Deliveries in a row with an early echo.
    early_echoes: u32,
    /// `true` for each of the last deliveries that had a file ack, oldest first.
    file_acks: VecDeque<bool>,
}

/// The signals of one delivery, at the end of its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeliveryRecord {
    /// Time from the first byte to the echo; `None` if there was none.
    pub echo_after: Option<Duration>,
    /// A file ack came.
    pub has_file_ack: bool,
    /// An ack over MCP or the API of the agent came.
    pub has_api_ack: bool,
}

/// A conclusion that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LearnedChange {
    /// The echo is not required any more, and nothing is typed again.
    EchoUnreliable,
    /// The echo counts as the strategy says.
    EchoReliable,
    /// The echo window is [`SHORT_ECHO_WINDOW`].
    EchoWindowShort,
    /// The echo window is [`SIGNAL_WINDOW`].
    EchoWindowFull,
}

impl Learned {
    /// Creates the state of a program of which nothing is known.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if the echo counts as the strategy says.
    pub fn is_echo_reliable(&self) -> bool {
        !self.is_echo_unreliable
    }

    /// Returns the time after the first byte in which an echo counts. The other channels keep [`SIGNAL_WINDOW`].
    pub fn echo_window(&self) -> Duration {
        if self.has_short_echo_window { SHORT_ECHO_WINDOW } else { SIGNAL_WINDOW }
    }

    /// Returns the share of file acks in per cent over the last deliveries, at most 500; `None` before the first.
    pub fn file_ack_percent(&self) -> Option<f64> {
        let acked = self.file_acks.iter().filter(|acked| **acked).count();
        (!self.file_acks.is_empty()).then(|| acked as f64 * 100.0 / self.file_acks.len() as f64)
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Takes the signals of one delivery and returns the conclusions that changed.
    pub fn record(&mut self, delivery: DeliveryRecord) -> Vec<LearnedChange> {
        let echo = self.record_echo(delivery);
        let window = self.record_file_ack(delivery.has_file_ack);
        echo.into_iter().chain(window).collect()
    }

    fn record_echo(&mut self, delivery: DeliveryRecord) -> Option<LearnedChange> {
        match delivery.echo_after {
            Some(after) if after <= ECHO_PATIENCE => self.early_echoes = self.early_echoes.saturating_add(1),
            Some(_) => self.early_echoes = 0,
            None => {
                self.early_echoes = 0;
                if delivery.has_file_ack || delivery.has_api_ack {
                    self.missing_echoes = self.missing_echoes.saturating_add(1);
                }
            }
        }
        if self.early_echoes >= ECHO_EVIDENCE {
            self.missing_echoes = 0;
            return std::mem::take(&mut self.is_echo_unreliable).then_some(LearnedChange::EchoReliable);
        }
        let becomes_unreliable = self.missing_echoes >= ECHO_EVIDENCE && !self.is_echo_unreliable;
        self.is_echo_unreliable |= becomes_unreliable;
        becomes_unreliable.then_some(LearnedChange::EchoUnreliable)
    }

    fn record_file_ack(&mut self, has_file_ack: bool) -> Option<LearnedChange> {
        self.file_acks.push_back(has_file_ack);
        let surplus = self.file_acks.len().saturating_sub(FILE_ACK_SAMPLE);
        self.file_acks.drain(..surplus);
        if self.file_acks.len() < FILE_ACK_SAMPLE {
            return None;
        }
        let acked = self.file_acks.iter().filter(|acked| **acked).count() * 100;
        // Two thresholds, so that the window does not change with every delivery near one of them.
        if !self.has_short_echo_window && acked > SHRINK_ABOVE_PERCENT * FILE_ACK_SAMPLE {
            self.has_short_echo_window = true;
            return Some(LearnedChange::EchoWindowShort);
        }
        if self.has_short_echo_window && acked < RESTORE_BELOW_PERCENT * FILE_ACK_SAMPLE {
            self.has_short_echo_window = false;
            return Some(LearnedChange::EchoWindowFull);
        }
        None
    }
}
