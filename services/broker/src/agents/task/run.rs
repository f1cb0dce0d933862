//! [`ProgramRun`]: one run of an agent's program, and the work that its task has started.

use std::{collections::HashMap, pin::Pin};

use futures::stream::FuturesUnordered;
use relay_pty::{PtyError, WriteId, WriteReceipt};
use relay_verification::Timestamp;

use crate::{
    agents::{
        activity::BlockedWatch,
        context_budget::ContextBudget,
        continuity::{ContinuityBlocks, ContinuityTurns, Notes},
        exit_line::ExitLine,
        gates::GateWatch,
        process::StartedProcess,
        session_status::SessionStatus,
    },
    clock,
    injection::{Failure, Pipeline, Readiness, Settlement, TypeRequest},
};

/// Work that the task has started.
pub(in crate::agents) type Works = FuturesUnordered<Work>;
// Boxed, so that works of different kinds share one set.
pub(in crate::agents) type Work = Pin<Box<dyn Future<Output = JobResult> + Send>>;

/// Result of something that the task has started.
pub(in crate::agents) enum JobResult {
    Written {
        request: TypeRequest,
        result: Result<WriteReceipt, PtyError>,
    },
    /// The ledger has the settlement, or could not be written.
    Recorded {
        settlement: Box<Settlement>,
        is_written: bool,
    },
    FailureReported(Box<Failure>),
    AckFiles(Vec<AckFileContent>),
    AckFileRemoved,
    /// Keys of the broker itself were typed, or could not be.
    KeysTyped,
    /// Notes to be typed back; none if there are none, or if some were saved.
    Notes(Option<Box<Notes>>),
}

/// An ack file that was found.
pub(in crate::agents) struct AckFileContent {
    pub(in crate::agents) key: u64,
    pub(in crate::agents) path: String,
    pub(in crate::agents) content: Vec<u8>,
}

/// One run of the program: its process, its pipeline, and what the task knows of it.
pub(in crate::agents) struct ProgramRun {
    pub(in crate::agents) process: StartedProcess,
    pub(in crate::agents) pipeline: Pipeline,
    pub(in crate::agents) readiness: Option<Readiness>,
    // Dropped with the program, if it has not ended in time. What must outlive the program is in `outcomes`.
    pub(in crate::agents) works: Works,
    /// Outcomes of messages that are not written yet, also those of the programs before.
    pub(in crate::agents) outcomes: Works,
    pub(in crate::agents) keys: HashMap<WriteId, u64>,
    pub(in crate::agents) exit_line: ExitLine,
    /// Since when it wants to end.
    pub(in crate::agents) wants_end_since: Option<Timestamp>,
    /// Answers of the terminal that the program did not read and that were counted.
    pub(in crate::agents) dropped_answers: u64,
    pub(in crate::agents) last_output_at: Timestamp,
    /// Instants of events only rise, also where output is taken late.
    pub(in crate::agents) latest: Timestamp,
    pub(in crate::agents) is_idle_reported: bool,
    pub(in crate::agents) is_reading_ack_files: bool,
    pub(in crate::agents) ack_files_due: Timestamp,
    /// Instant from which ack files that were not accepted are removed.
    pub(in crate::agents) ack_sweep_due: Timestamp,
    pub(in crate::agents) status: SessionStatus,
    pub(in crate::agents) context: ContextBudget,
    pub(in crate::agents) continuity: ContinuityBlocks,
    pub(in crate::agents) continuity_turns: ContinuityTurns,
    /// The last messages, for notes that the agent saves.
    pub(in crate::agents) notes: Notes,
    /// The last output behind which rest was checked.
    pub(in crate::agents) rest_checked_for: Option<Timestamp>,
    pub(in crate::agents) blocked: BlockedWatch,
    /// The program's question that is on the screen.
    pub(in crate::agents) gate: GateWatch,
    /// Instant at which an Enter without an effect is repeated.
    pub(in crate::agents) repeat_enter_at: Option<Timestamp>,
}

impl ProgramRun {
    /// A program that was just started.
    pub(super) fn new(process: StartedProcess, pipeline: Pipeline, readiness: Readiness, now: Timestamp) -> Self {
        Self {
            process,
            pipeline,
            readiness: Some(readiness),
            works: Works::new(),
            outcomes: Works::new(),
            keys: HashMap::new(),
            exit_line: ExitLine::default(),
            wants_end_since: None,
            dropped_answers: 0,
            last_output_at: now,
            latest: now,
            is_idle_reported: false,
            is_reading_ack_files: false,
            ack_files_due: now,
            ack_sweep_due: now,
            status: SessionStatus::new(now),
            context: ContextBudget::default(),
            continuity: ContinuityBlocks::default(),
            continuity_turns: ContinuityTurns::default(),
            notes: Notes::default(),
            rest_checked_for: None,
            blocked: BlockedWatch::default(),
            gate: GateWatch::default(),
            repeat_enter_at: None,
        }
    }

    /// This moment, never before an earlier one.
    pub(in crate::agents) fn tick(&mut self) -> Timestamp {
        self.latest = clock::now().max(self.latest);
        self.latest
    }
}
