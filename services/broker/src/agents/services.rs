//! [`Services`]: what the tasks of all agents share.

use std::{
    collections::BTreeMap,
    ops::Deref,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use relay_pty::{Account, PtyHost};
use relay_verification::Level;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::{AckWatch, Agents, ContinuityFolder};
use crate::{
    engine::{Engine, Identity, Request},
    engine_link::EngineLink,
    events::{DeliveryRef, Event, Hub},
    harness::HarnessTable,
    insight::{CrashLog, DeadLetters, VerificationBook},
    metric_names,
    state::{Ledger, ProjectFiles, Roster},
};

/// What the agents of one workspace share. Cheap to share.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) shared: Shared,
    pub(crate) link: EngineLink,
    pub(crate) identity: Arc<Identity>,
}

impl Services {
    /// Name of the workspace in typed messages, where there are several.
    pub(crate) fn workspace_label(&self) -> Option<String> {
        let Identity { workspace_alias, workspace_id, .. } = self.identity.as_ref();
        let label = || workspace_alias.clone().unwrap_or_else(|| workspace_id.clone());
        self.settings.names_workspace.then(label)
    }
}

impl Deref for Services {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// Handles and settings of the broker, the same for all workspaces. Cheap to share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) host: PtyHost,
    pub(crate) engine: Engine,
    pub(crate) hub: Arc<Hub>,
    pub(crate) ledger: Ledger,
    pub(crate) roster: Arc<Roster>,
    pub(crate) project_files: Arc<ProjectFiles>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) harnesses: Arc<HarnessTable>,
    pub(crate) receipts: mpsc::Sender<Receipt>,
    pub(crate) reports: mpsc::Sender<Report>,
    pub(crate) crashes: Arc<CrashLog>,
    pub(crate) dead_letters: Arc<DeadLetters>,
    pub(crate) verification: Arc<VerificationBook>,
    pub(crate) ack_watch: Arc<AckWatch>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) held: Arc<HeldTime>,
    pub(crate) tasks: TaskTracker,
    pub(crate) settings: Arc<AgentSettings>,
}

/// Settings that concern agents.
#[derive(Debug)]
pub(crate) struct AgentSettings {
    pub(crate) working_directory: PathBuf,
    /// Messages say of which workspace they are: there are several.
    pub(crate) names_workspace: bool,
    /// URL of the local API.
    pub(crate) api_url: String,
    /// User as whom agents run, if not the broker's own.
    pub(crate) account: Option<Arc<Account>>,
    pub(crate) max_agents: u32,
    pub(crate) default_channels: Vec<String>,
    pub(crate) mcp_command: String,
    pub(crate) share_workspace_key: bool,
    pub(crate) allow_permission_bypass: bool,
    /// First-run questions of programs that the broker answers.
    pub(crate) answered_gates: Vec<String>,
    /// Agents are shown how to confirm a message.
    pub(crate) ack_hint: bool,
    pub(crate) minimum_high: Level,
    pub(crate) receipts: ReceiptPolicy,
    pub(crate) continuity: ContinuityFolder,
}

/// Deliveries that are reported to those who watch the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ReceiptPolicy {
    /// Unverified and failed ones.
    Exceptions,
    All,
    Off,
}

/// Event of an agent for the engine.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) agent: String,
    pub(crate) token: String,
    pub(crate) kind: &'static str,
    pub(crate) payload: Value,
    /// Makes a repetition harmless.
    pub(crate) key: Option<String>,
}

/// Posts events of agents, one after the other. A refused one is left out: they are for people who watch.
pub(crate) async fn run_reports(engine: Engine, mut reports: mpsc::Receiver<Report>) {
    while let Some(Report { agent, token, kind, payload, key }) = reports.recv().await {
        let path = ["agents", agent.as_str(), "events"];
        let request = Request::post(&path, &token, json!({ "type": kind, "payload": payload }));
        let request = Request { idempotency_key: key, ..request };
        if let Err(error) = engine.call(request).await {
            metrics::counter!(metric_names::REPORTS_DROPPED).increment(1);
            tracing::debug!(agent.name = agent, kind, %error, "an event of an agent was not taken");
        }
    }
}

/// Totals since the start of the broker.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) spawned: AtomicU64,
    pub(crate) restarts: AtomicU64,
}

/// Time for which the output rate has held messages back, by harness. The counter is in whole seconds.
#[derive(Debug, Default)]
pub(crate) struct HeldTime {
    totals: Mutex<BTreeMap<String, Duration>>,
}

impl HeldTime {
    pub(crate) fn add(&self, harness: &str, time: Duration) {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let total = totals.entry(harness.to_owned()).or_default();
        *total += time;
        metrics::counter!(metric_names::OUTPUT_HOLD_SECONDS, "harness" => harness.to_owned()).absolute(total.as_secs());
    }
}

/// A message whose reader the engine is told about.
#[derive(Debug)]
pub(crate) struct Receipt {
    pub(crate) agent: String,
    pub(crate) token: String,
    pub(crate) delivery: DeliveryRef,
}

/// Reports messages as read, one after the other; never on the way of an ack.
pub(crate) async fn run_receipts(engine: Engine, hub: Arc<Hub>, mut receipts: mpsc::Receiver<Receipt>) {
    while let Some(Receipt { agent, token, delivery }) = receipts.recv().await {
        let path = ["messages", delivery.event_id.as_str(), "read"];
        let outcome = engine.call(Request::post(&path, &token, json!({}))).await;
        let (status, reason) = match outcome {
            Ok(_) => ("marked", None),
            Err(error) => {
                tracing::info!(agent.name = agent, %error, "a read receipt was not taken");
                ("failed", Some(error.to_string()))
            }
        };
        hub.publish(&agent, &Event::DeliveryReadAck { delivery, status, reason });
    }
}
