//! Types of the listen API that more than one handler knows: events, frames and payloads of runners, bodies and entries
//! of answers. Bodies that only one handler reads stand beside it. Main types: [`Event`], [`EventFrame`] and
//! [`SpawnBody`].
//!
//! They hold data and its encoding. What is done with it is in the modules that use them, and none of those is named
//! here.

mod crash;
mod event;
mod message;
pub(crate) mod runner_frame;
mod runner_request;
mod spawn;
mod verification;

pub(crate) use crash::{CrashCategory, CrashInsights, CrashPattern, CrashRecord};
pub(crate) use event::{DeliveryProof, DeliveryRef, Event, EventFrame, ProcessFacts, ReplayGap};
pub(crate) use message::{DeadLetterEntry, PendingMessage};
pub(crate) use runner_request::{
    HandlerResult, Hello, RegisterHandlers, RegisterNode, RunnerAnswer, RunnerManifest, SpawnAgent, Supervision,
};
pub(crate) use spawn::{
    AppServerAuth, AppServerConfig, AppServerRelease, RestartPolicy, SpawnBody, VerificationOverride,
};
pub(crate) use verification::{Latencies, LearnedReport, ProgramReport, VerificationReport};
