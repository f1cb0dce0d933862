//! Hosted agents: what was asked for ([`AgentSpec`]), who runs ([`Agents`]), how one is started ([`Spawner`]) and the
//! task that owns one ([`task`]).

mod ack_files;
mod activity;
mod agent_error;
mod command;
mod crash;
mod environment;
mod exit_line;
mod happenings;
mod process;
mod registry;
mod services;
mod spawner;
mod spec;
mod task;

pub(crate) use activity::{AgentInfo, AgentState};
pub(crate) use agent_error::AgentError;
pub(crate) use command::{AgentCommand, AgentHandle, Drained, PendingMessage};
pub(crate) use crash::{CrashInsights, CrashLog};
pub(crate) use environment::MARKER;
pub(crate) use registry::Agents;
pub(crate) use services::{AgentSettings, Receipt, Services, run_receipts};
pub(crate) use spawner::Spawner;
pub(crate) use spec::{AgentSpec, RestartPolicy, SpawnSource};
