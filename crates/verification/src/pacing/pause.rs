//! [`Pause`]: the time between two injections into one agent.

use std::time::Duration;

/// The pauses that failed attempts step through. The steps of published brokers.
const STEPS: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_millis(1000),
    Duration::from_millis(2000),
    Duration::from_millis(5000),
];

/// Shortest pause. Our choice.
const SHORTEST: Duration = Duration::from_millis(10);

/// Number of verified deliveries in a row after which the pause is halved. Our choice.
const ROW: u32 = 3;

/// The pause between the Enter of one injection and the start of the next: 100 ms at first, 10 ms to 5 s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    duration: Duration,
    verified_in_row: u32,
}

impl Default for Pause {
    fn default() -> Self {
        Self { duration: STEPS[0], verified_in_row: 0 }
    }
}

impl Pause {
    /// The pause now.
    pub fn duration(self) -> Duration {
        self.duration
    }

    /// A delivery was verified. Every third in a row halves the pause.
    pub fn verified(&mut self) {
        self.verified_in_row += 1;
        if self.verified_in_row == ROW {
            self.verified_in_row = 0;
            self.duration = (self.duration / 2).max(SHORTEST);
        }
    }

    /// An attempt failed: the next longer step.
    pub fn attempt_failed(&mut self) {
        self.verified_in_row = 0;
        let longest = STEPS[STEPS.len() - 1];
        self.duration = STEPS.into_iter().find(|step| *step > self.duration).unwrap_or(longest);
    }

    /// A delivery ended unverified: that says nothing about the pace, but ends the row.
    pub fn unverified(&mut self) {
        self.verified_in_row = 0;
    }
}
