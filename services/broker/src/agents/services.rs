//! [`Services`]: what the tasks of all agents share.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    ops::Deref,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use futures::{StreamExt as _, stream::poll_fn};
use relay_pty::{Account, PtyHost};
use relay_verification::Level;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::task::TaskTracker;

use super::{Agents, ContinuityFolder};
use crate::{
    api::types::{DeliveryRef, Event},
    engine::{Engine, Identity, Request},
    engine_link::EngineLink,
    events::Hub,
    harness::HarnessTable,
    insight::{CrashLog, DeadLetters, VerificationBook},
    linux::FolderWatch,
    metric_names,
    state::{Ledger, ProjectFiles, Roster},
};

/// Time for the report that a message was read.
const RECEIPT_TIMEOUT: Duration = Duration::from_secs(2);
const RECEIPTS_SIDE_BY_SIDE: usize = 8;
/// Maximum number of messages remembered as reported.
const MAX_REPORTED: usize = 4096;

/// Services shared by the agents of one workspace. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) shared: SharedServices,
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
    type Target = SharedServices;

    fn deref(&self) -> &SharedServices {
        &self.shared
    }
}

/// Handles and settings of the broker, the same for all workspaces. Cheap to share.
#[derive(Clone)]
pub(crate) struct SharedServices {
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
    pub(crate) ack_watch: Arc<FolderWatch>,
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
    // One at a time, so that no `turn.settled` overtakes its `turn.started`.
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

/// Read message whose receipt is reported to the engine.
#[derive(Debug)]
pub(crate) struct Receipt {
    pub(crate) agent: String,
    pub(crate) token: String,
    pub(crate) delivery: DeliveryRef,
}

/// Reports messages as read, several side by side and each once; never on the way of an ack.
pub(crate) async fn run_receipts(engine: Engine, hub: Arc<Hub>, mut receipts: mpsc::Receiver<Receipt>) {
    let mut reported = ReportedReads::default();
    let receipts = poll_fn(move |context| receipts.poll_recv(context)).map(|receipt| {
        // Decided in the order of the queue, so that the first receipt of a message is the one reported. The concurrent
        // futures below cannot share the set.
        let is_new = reported.insert(&receipt);
        (receipt, is_new)
    });
    receipts
        .for_each_concurrent(RECEIPTS_SIDE_BY_SIDE, async |(receipt, is_new)| {
            let Receipt { agent, token, delivery } = receipt;
            let (status, reason) =
                if is_new { report_read(&engine, &token, &delivery).await } else { ("suppressed_duplicate", None) };
            if let Some(error) = &reason {
                tracing::info!(agent.name = agent, error, "a read receipt was not taken");
            }
            hub.publish(&agent, &Event::DeliveryReadAck { delivery, status, reason });
        })
        .await;
}

async fn report_read(engine: &Engine, token: &str, delivery: &DeliveryRef) -> (&'static str, Option<String>) {
    let path = ["messages", delivery.event_id.as_str(), "read"];
    match timeout(RECEIPT_TIMEOUT, engine.call(Request::post(&path, token, json!({})))).await {
        Ok(Ok(_)) => ("marked", None),
        Ok(Err(error)) => ("failed", Some(error.to_string())),
        Err(_) => ("failed", Some("the engine has not answered in time".to_owned())),
    }
}

/// The messages reported last, by reader.
#[derive(Debug, Default)]
struct ReportedReads {
    known: HashSet<(String, String)>,
    order: VecDeque<(String, String)>,
}

impl ReportedReads {
    /// Returns `false` if the message was reported before.
    fn insert(&mut self, receipt: &Receipt) -> bool {
        let key = (receipt.agent.clone(), receipt.delivery.event_id.clone());
        if !self.known.insert(key.clone()) {
            return false;
        }
        self.order.push_back(key);
        if self.order.len() > MAX_REPORTED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_reported_as_read_once_for_each_reader() {
        let receipt = |agent: &str, event: usize| Receipt {
            agent: agent.to_owned(),
            token: String::new(),
            delivery: DeliveryRef { delivery_id: String::new(), event_id: event.to_string() },
        };
        let mut reported = ReportedReads::default();
        assert!(reported.insert(&receipt("ada", 0)) && reported.insert(&receipt("bob", 0)));
        assert!(!reported.insert(&receipt("ada", 0)));
        assert!((1..=MAX_REPORTED).all(|event| reported.insert(&receipt("ada", event))));
        assert_eq!((reported.known.len(), reported.insert(&receipt("ada", 0))), (MAX_REPORTED, true));
    }
}
