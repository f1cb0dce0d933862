//! After a crash: ends what the previous broker left behind, and starts its agents again.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use relay_pty::{Account, Leftover, ProcessIdentity, PtyHost};

use futures::future::join_all;
use tokio::{sync::Semaphore, time::sleep};

use crate::{
    agents::{AgentError, AgentSpec, Members, SpawnSource, remove_left_acks},
    state::{AgentRecord, LedgerTask, Roster, RosterFile},
};

/// Maximum time for processes without a broker to end politely.
const GRACE: Duration = Duration::from_millis(500);
/// Pause before the next attempt while the engine is unavailable.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Agents that are started at the same time.
const SIDE_BY_SIDE: usize = 8;

/// An agent to start again, with the messages that its session has already.
#[derive(Debug)]
pub(crate) struct RestorableAgent {
    spec: AgentSpec,
    had: Vec<String>,
}

/// Ends all processes of the previous broker's agents.
pub(crate) async fn end_leftovers(host: &PtyHost, previous: &RosterFile) -> Result<()> {
    let leftover = |record: &AgentRecord| Leftover {
        root: ProcessIdentity { pid: record.pid, start_ticks: record.start_ticks },
        marker: record.marker.clone().into(),
    };
    let leftovers: Vec<Leftover> = previous.agents.values().map(leftover).collect();
    if leftovers.is_empty() || previous.is_of_earlier_boot() {
        return Ok(());
    }
    let report = host.end_leftovers(&leftovers, GRACE).await.context("end the previous broker's agents")?;
    tracing::info!(agents = leftovers.len(), killed = report.killed, "the previous broker's agents were ended");
    Ok(())
}

/// Removes the acks that agents have left which are not started again. Blocks.
pub(crate) fn remove_acks(previous: &RosterFile, working_directory: &Path, account: Option<&Arc<Account>>) {
    for record in previous.agents.values() {
        remove_left_acks(&record.spec, working_directory, account.cloned());
    }
}

/// The agents to start again. The roster keeps them until then.
pub(crate) fn restorable_agents(previous: RosterFile, ledger: &LedgerTask, roster: &Roster) -> Vec<RestorableAgent> {
    roster.keep(previous.agents.clone());
    let restorable = |record: AgentRecord| {
        let mut spec = record.spec;
        // The invocation that it was started for has its result.
        spec.invocation_id = None;
        let session = spec.session_id.clone().filter(|_| spec.is_resumable);
        // Without a session that is resumed the program has none of the messages, and gets all of them again.
        let had = session.map(|session| ledger.known_messages(&record.agent_id, &session)).unwrap_or_default();
        if spec.is_resumable && record.task_typed {
            spec.task = None;
        }
        RestorableAgent { spec, had }
    };
    previous.agents.into_values().map(restorable).collect()
}

/// Starts the agents again, side by side, however long the engine is unavailable.
pub(crate) async fn start(members: Members, agents: Vec<RestorableAgent>, roster: Arc<Roster>) {
    let places = Semaphore::new(SIDE_BY_SIDE);
    let restarts = agents.into_iter().map(|agent| start_one(&members, agent, &roster, &places));
    join_all(restarts).await;
}

async fn start_one(members: &Members, agent: RestorableAgent, roster: &Arc<Roster>, places: &Semaphore) {
    let RestorableAgent { spec, had } = agent;
    let name = spec.name.clone();
    let Some(spawner) = members.named(spec.workspace.as_deref()) else {
        tracing::error!(
            agent.name = name,
            workspace = spec.workspace,
            "the workspace of an agent is not joined any more"
        );
        return forget(members, roster, spec).await;
    };
    let outcome = loop {
        let outcome = {
            // An agent that waits for its next attempt has no place.
            let _place = places.acquire().await;
            spawner.spawn(spec.clone(), SpawnSource::Restart, had.clone()).await
        };
        match outcome {
            Err(error) if error.is_transient() => {
                tracing::warn!(agent.name = name, %error, "an agent cannot be started again yet, retrying");
                sleep(RETRY_PAUSE).await;
            }
            outcome => break outcome,
        }
    };
    match outcome {
        Ok(spawned) => tracing::info!(agent.name = name, pid = spawned.pid, "agent restored"),
        // Otherwise the name is used elsewhere in the workspace.
        Err(AgentError::AlreadyExists { .. }) if spawner.services().agents.is_in_use(&name) => {
            tracing::info!(agent.name = name, "agent was started by a driver meanwhile, not restored");
        }
        Err(error) => {
            tracing::error!(agent.name = name, %error, "an agent could not be started again");
            forget(members, roster, spec).await;
        }
    }
}

async fn forget(members: &Members, roster: &Arc<Roster>, spec: AgentSpec) {
    let settings = &members.default_workspace().services().settings;
    let (working_directory, account) = (settings.working_directory.clone(), settings.account.clone());
    let roster = roster.clone();
    let removed = tokio::task::spawn_blocking(move || {
        remove_left_acks(&spec, &working_directory, account);
        roster.remove(&spec.name)
    })
    .await;
    if let Ok(Err(error)) = removed {
        tracing::error!(
            error = format!("{error:#}"),
            "failed to store the removal of an agent, retrying; a crash before that restarts it"
        );
    }
}
