//! Records of the past for drivers and operators: crashes ([`CrashLog`]), deliveries that failed ([`DeadLetters`]),
//! figures of verification ([`VerificationBook`]), lengths of queues. Filled by the tasks of agents, read by the API.

mod crashes;
mod dead_letters;
mod figures;
mod queue_gauges;
mod verification_book;

pub(crate) use crashes::CrashLog;
pub(crate) use dead_letters::{DeadLetter, DeadLetters};
pub(crate) use figures::Outcome;
pub(crate) use queue_gauges::{count_dropped, count_dropped_entries, show_queues};
pub(crate) use verification_book::{ProgramVersion, VerificationBook};
