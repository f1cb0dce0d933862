//! Hosted agents: what was asked for ([`AgentSpec`]), who runs ([`Agents`]), how one is started ([`Spawner`]) and the
//! task that owns one ([`task`]).

mod ack_files;
mod ack_watch;
mod activity;
mod agent_error;
mod command;
mod context_budget;
mod continuity;
mod crash;
mod dead_letters;
mod environment;
mod exit_line;
mod figures;
mod happenings;
mod process;
mod registry;
mod reporting;
mod result_schema;
mod services;
mod session_status;
mod spawner;
mod spec;
mod task;
mod verification_book;

pub(crate) use ack_watch::AckWatch;
pub(crate) use activity::{AgentInfo, AgentState};
pub(crate) use agent_error::AgentError;
pub(crate) use command::{AgentCommand, AgentHandle, Drained, PendingMessage};
pub(crate) use continuity::ContinuityFolder;
pub(crate) use crash::{CrashInsights, CrashLog};
pub(crate) use dead_letters::{DeadLetter, DeadLetters};
pub(crate) use environment::MARKER;
pub(crate) use registry::Agents;
pub(crate) use result_schema::ResultSchema;
pub(crate) use services::{AgentSettings, Receipt, ReceiptPolicy, Report, Services, run_receipts, run_reports};
pub(crate) use spawner::Spawner;
pub(crate) use spec::{AgentSpec, RestartPolicy, SpawnSource, VerificationOverride};
pub(crate) use verification_book::VerificationBook;
