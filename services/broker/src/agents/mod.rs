//! Hosted agents: what was asked for ([`AgentSpec`]), who runs ([`Agents`]), how one is started ([`Spawner`]) and the
//! task that owns one ([`task`]). Agents without a terminal are in [`headless`].

mod ack_files;
mod activity;
mod agent_error;
mod command;
mod context_budget;
mod continuity;
mod echo_guard;
mod end;
mod environment;
mod exit_line;
mod gates;
mod headless;
mod mcp;
mod members;
mod outcomes;
mod process;
mod registration;
mod registry;
mod reporting;
mod result_schema;
mod services;
mod session_status;
mod spawner;
mod spec;
mod task;

pub(crate) use activity::{AgentInfo, AgentState};
pub(crate) use agent_error::AgentError;
pub(crate) use command::{AgentCommand, AgentHandle, ModeChange, wait_written, write_error};
pub(crate) use continuity::ContinuityFolder;
pub(crate) use end::remove_left_acks;
pub(crate) use environment::{MARKER, withheld_variables};
pub(crate) use headless::Headless;
pub(crate) use members::Members;
pub(crate) use registration::AgentBinding;
pub(crate) use registry::Agents;
pub(crate) use result_schema::ResultSchema;
pub(crate) use services::{
    AgentSettings, Receipt, ReceiptPolicy, Report, Services, SharedServices, run_receipts, run_reports,
};
pub(crate) use spawner::{Spawner, join_or_create};
pub(crate) use spec::{AgentSpec, RestartCount, SessionSource, SpawnSource};
