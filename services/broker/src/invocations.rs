//! Invocations of the engine: `release` and `spawn:…` by the broker itself, everything that a runner has a handler for
//! by the runner.

use std::{
    collections::{HashMap, VecDeque},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
};

use relay_wire::nodes::{engine_frame::ActionInvoke, frame::ActionResult};
use serde_json::{Map, Value, json};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Duration, Instant, timeout, timeout_at},
};

use crate::{
    agents::{AgentError, AgentHandle, Services, SpawnSource, Spawner},
    api::{release_agent, types::SpawnBody},
    runner::Runners,
    unreadable_json::unreadable,
};

/// Error by which an invocation is given back.
const UNAVAILABLE: &str = "handler_unavailable";
/// Time of a handler whose capability says nothing about it.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(15 * 60);
const MAX_HANDLER_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// A handler that takes longer is announced to the engine.
const ACCEPT_AFTER: Duration = Duration::from_secs(10);
/// Results remembered, to be repeated for a repeated invocation.
const REMEMBERED: usize = 1024;
/// Bytes of the results that are remembered, so that large ones push out older ones before they are that many.
const REMEMBERED_BYTES: usize = 32 << 20;
const REMEMBERED_FOR: Duration = Duration::from_secs(60 * 60);
/// Invocations that are handled at the same time.
const SIDE_BY_SIDE: usize = 256;

/// Outcomes by invocation; absent while one is being handled.
#[derive(Debug, Default)]
struct Outcomes {
    known: HashMap<String, Option<StoredOutcome>>,
    /// By age.
    order: VecDeque<(String, Instant)>,
    /// Of all outcomes.
    bytes: usize,
}

/// An outcome as it is stored: an output as its JSON text, whose size is known and smaller than that of the value.
#[derive(Debug, Clone, PartialEq)]
struct StoredOutcome(Result<String, String>);

/// Handlers of invocations: the broker, and the runner that is connected.
#[derive(Clone)]
pub(crate) struct Handlers {
    pub(crate) services: Services,
    pub(crate) spawner: Spawner,
    pub(crate) runners: Arc<Runners>,
}

/// Handles invocations side by side, each once.
pub(crate) async fn run(handlers: Handlers, mut invocations: mpsc::Receiver<ActionInvoke>) {
    let services = handlers.services.clone();
    let outcomes = Arc::<Mutex<Outcomes>>::default();
    let places = Arc::new(Semaphore::new(SIDE_BY_SIDE));
    while let Some(invoke) = invocations.recv().await {
        let id = invoke.invocation_id.clone();
        let known = {
            let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
            let known = outcomes.known.get(&id).cloned();
            if known.is_none() {
                outcomes.begin(&id);
            }
            known
        };
        match known {
            Some(Some(outcome)) => services.link.send_result(result(id, outcome.restore())),
            // It is being handled.
            Some(None) => {}
            None => {
                let (handlers, outcomes, place) =
                    (handlers.clone(), outcomes.clone(), places.clone().try_acquire_owned());
                services.tasks.spawn(async move {
                    let outcome = match &place {
                        Ok(_) => handle(&handlers, invoke).await,
                        // Given back at once, so that the engine can place it on another node.
                        Err(_) => Err(UNAVAILABLE.to_owned()),
                    };
                    // An engine gives the same invocation again when no handler was there.
                    let is_final = outcome != Err(UNAVAILABLE.to_owned());
                    let remembered = is_final.then(|| StoredOutcome::new(&outcome));
                    // Before the result is sent: a repetition that follows it must find the outcome.
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).finish(&id, remembered);
                    handlers.services.link.send_result(result(id, outcome));
                });
            }
        }
    }
}

impl Outcomes {
    fn begin(&mut self, id: &str) {
        self.forget(REMEMBERED - 1);
        self.known.insert(id.to_owned(), None);
        self.order.push_back((id.to_owned(), Instant::now()));
    }

    /// Remembers an outcome; without one the invocation is handled once more when it comes again.
    fn finish(&mut self, id: &str, outcome: Option<StoredOutcome>) {
        match (outcome, self.known.get_mut(id)) {
            (Some(outcome), Some(known)) => {
                self.bytes += outcome.len();
                *known = Some(outcome);
                self.forget(REMEMBERED);
            }
            (None, Some(_)) => {
                self.known.remove(id);
                self.order.retain(|(known, _)| known != id);
            }
            (_, None) => {}
        }
    }

    /// Forgets old outcomes, and the oldest ones beyond the bounds.
    fn forget(&mut self, most: usize) {
        let now = Instant::now();
        let mut count = self.order.len();
        let Self { known, order, bytes } = self;
        order.retain(|(id, began)| {
            // Only finished ones: the outcome of another is still to come.
            let Some(Some(outcome)) = known.get(id) else { return true };
            let is_old = now.duration_since(*began) >= REMEMBERED_FOR;
            let is_forgotten = is_old || count > most || *bytes > REMEMBERED_BYTES;
            if is_forgotten {
                count -= 1;
                *bytes -= outcome.len();
                known.remove(id);
            }
            !is_forgotten
        });
    }
}

impl StoredOutcome {
    fn new(outcome: &Result<Value, String>) -> Self {
        Self(outcome.as_ref().map(Value::to_string).map_err(Clone::clone))
    }

    fn restore(self) -> Result<Value, String> {
        self.0.and_then(|output| serde_json::from_str(&output).map_err(|error| error.to_string()))
    }

    fn len(&self) -> usize {
        self.0.as_ref().map_or_else(String::len, String::len)
    }
}

async fn handle(handlers: &Handlers, invoke: ActionInvoke) -> Result<Value, String> {
    let Handlers { services, spawner, runners } = handlers;
    match invoke.action.as_str() {
        "release" => keep(services, &invoke, release(services, &invoke)).await,
        action if runners.has_handler(action) => run_handler(services, runners, invoke).await,
        action if action == "spawn" || action.starts_with("spawn:") => {
            keep(services, &invoke, spawn(services, spawner, &invoke)).await
        }
        _ => Err(UNAVAILABLE.to_owned()),
    }
}

/// Waits for the broker's own work, and keeps the engine from taking the invocation away when it takes longer.
async fn keep(
    services: &Services,
    invoke: &ActionInvoke,
    work: impl Future<Output = Result<Value, String>>,
) -> Result<Value, String> {
    let mut work = pin!(work);
    match timeout(ACCEPT_AFTER, &mut work).await {
        Ok(outcome) => outcome,
        Err(_) => {
            services.link.accept(&invoke.invocation_id);
            work.await
        }
    }
}

/// Has the runner handle an invocation, and keeps the engine from taking it away meanwhile.
async fn run_handler(services: &Services, runners: &Runners, invoke: ActionInvoke) -> Result<Value, String> {
    let ActionInvoke { invocation_id, action, input, .. } = invoke;
    let limit = services.link.manifest().handler_timeout_ms(&action);
    let limit = limit.map_or(HANDLER_TIMEOUT, |millis| Duration::from_millis(millis).min(MAX_HANDLER_TIMEOUT));
    let deadline = Instant::now() + limit;
    let Some(mut outcome) = runners.call(&invocation_id, &action, &Value::Object(input)) else {
        return Err(UNAVAILABLE.to_owned());
    };
    let accept_at = Instant::now() + ACCEPT_AFTER;
    // A dropped sender means that the runner has left.
    if let Ok(outcome) = timeout_at(accept_at.min(deadline), &mut outcome).await {
        return outcome.unwrap_or_else(|_| Err(UNAVAILABLE.to_owned()));
    }
    if accept_at < deadline {
        services.link.accept(&invocation_id);
        if let Ok(outcome) = timeout_at(deadline, &mut outcome).await {
            return outcome.unwrap_or_else(|_| Err(UNAVAILABLE.to_owned()));
        }
    }
    runners.cancel(&invocation_id, "handler_timeout");
    Err("handler_timeout".to_owned())
}

async fn release(services: &Services, invoke: &ActionInvoke) -> Result<Value, String> {
    let agents = services.agents.list();
    let by_id = || {
        let id = invoke.agent_id.as_deref()?;
        agents.iter().find(|agent| agent.binding.agent_id().as_deref() == Some(id)).map(|agent| agent.spec.name.clone())
    };
    let named = invoke.agent_name.clone().or_else(|| text(&invoke.input, &["name", "agent_name", "agent"]));
    let name = named.or_else(by_id).ok_or("release_missing_agent_name")?;
    let workspace = &services.identity.workspace_id;
    let is_elsewhere =
        |agent: &AgentHandle| agent.spec.name == name && agent.spec.workspace.as_ref() != Some(workspace);
    if agents.iter().any(is_elsewhere) {
        // Another workspace's agent of this name: this workspace has none.
        return Ok(json!({ "released": true, "name": name }));
    }
    release_agent(services, &name, text(&invoke.input, &["reason"])).await;
    Ok(json!({ "released": true, "name": name }))
}

async fn spawn(services: &Services, spawner: &Spawner, invoke: &ActionInvoke) -> Result<Value, String> {
    let input = &invoke.input;
    let name = text(input, &["name", "agent_name", "agent"]).ok_or("spawn_missing_agent_name")?;
    let named = invoke.action.strip_prefix("spawn:").map(str::to_owned);
    let cli = text(input, &["cli", "command", "provider"]).or(named).ok_or("spawn_missing_cli")?;
    let mut fields = input.clone();
    fields.insert("name".to_owned(), json!(name));
    fields.insert("cli".to_owned(), json!(cli));
    // This function reads them. With two names of one field the body would be refused for a duplicate.
    for key in ["command", "provider", "capability", "initial_task", "initialTask", "prompt", "runtime"] {
        fields.remove(key);
    }
    if let Some(task) = text(input, &["task", "initial_task", "prompt"]) {
        fields.insert("task".to_owned(), json!(task));
    }
    if let (Some(channel), None) = (text(input, &["channel"]), input.get("channels")) {
        fields.insert("channels".to_owned(), json!([channel]));
    }
    if let Some(session) = text(input, &["session_ref"]) {
        fields.insert("session_id".to_owned(), json!(session));
        fields.remove("sessionId");
    }
    let body: Result<SpawnBody, _> = serde_json::from_value(Value::Object(fields));
    let mut body = body.map_err(|error| format!("spawn_failed: {}", unreadable(&error)))?;
    body.invocation_id = Some(invoke.invocation_id.clone());
    let spec = body.into_spec(services).map_err(|error| format!("spawn_failed: {error}"))?;
    match spawner.spawn(spec, SpawnSource::Engine, Vec::new()).await {
        Ok(_) => Ok(json!({ "spawned": true, "name": name })),
        Err(AgentError::AlreadyExists { .. }) => {
            // An invocation that is repeated after its outcome was forgotten: its agent runs already.
            let is_same = services
                .agents
                .get(&name)
                .is_ok_and(|agent| agent.spec.invocation_id.as_deref() == Some(invoke.invocation_id.as_str()));
            if is_same {
                Ok(json!({ "spawned": true, "name": name }))
            } else {
                Err("spawn_agent_name_in_use".to_owned())
            }
        }
        Err(error) => Err(format!("spawn_failed: {error}")),
    }
}

fn text(input: &Map<String, Value>, keys: &[&str]) -> Option<String> {
    keys.iter().find_map(|key| input.get(*key)?.as_str()).filter(|text| !text.is_empty()).map(str::to_owned)
}

fn result(invocation_id: String, outcome: Result<Value, String>) -> ActionResult {
    let (output, error) = match outcome {
        Ok(output) => (Some(Some(output)), None),
        Err(error) => (None, Some(error)),
    };
    ActionResult { invocation_id, output, error, is_final: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn outcomes_are_forgotten_by_age_and_number_and_never_before_they_are_known() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("open");
        for number in 0..REMEMBERED + 10 {
            let id = number.to_string();
            outcomes.begin(&id);
            outcomes.finish(&id, Some(StoredOutcome::new(&Ok(Value::Null))));
        }
        assert_eq!(outcomes.known.len(), REMEMBERED);
        assert!(outcomes.known.contains_key("open") && !outcomes.known.contains_key("0"));
        tokio::time::advance(REMEMBERED_FOR).await;
        outcomes.begin("new");
        assert_eq!((outcomes.known.len(), outcomes.order.len(), outcomes.bytes), (2, 2, 0));
    }

    #[test]
    fn large_outcomes_push_out_older_ones_and_come_back_unchanged() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("open");
        let output = json!({ "text": "x".repeat(768 << 10) });
        for number in 0..100 {
            let id = number.to_string();
            outcomes.begin(&id);
            outcomes.finish(&id, Some(StoredOutcome::new(&Ok(output.clone()))));
        }
        let kept: usize = outcomes.known.values().flatten().map(StoredOutcome::len).sum();
        assert!(kept == outcomes.bytes && kept <= REMEMBERED_BYTES && kept > REMEMBERED_BYTES - (1 << 20), "{kept}");
        assert!(outcomes.known.contains_key("open") && !outcomes.known.contains_key("0"));
        assert_eq!(outcomes.known.len(), outcomes.order.len());
        let newest = outcomes.known.remove("99").flatten().expect("the newest");
        assert_eq!(newest.restore(), Ok(output));
        let failed = StoredOutcome::new(&Err("no".to_owned()));
        assert_eq!((failed.len(), failed.restore()), (2, Err("no".to_owned())));
    }
}
