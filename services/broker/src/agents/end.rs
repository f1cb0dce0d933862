//! End of an agent: its registrations and files are removed in a fixed order.

use std::{path::Path, sync::Arc};

use relay_pty::Account;
use serde_json::json;

use super::{AgentSpec, ack_files::AckFolder, process::Launch, task::AgentTask};
use crate::api::types::Event;

impl AgentTask {
    /// Reports a release, with the number of messages that it leaves behind.
    pub(super) async fn conclude_release(&self, left: usize, reason: Option<String>) {
        self.leave().await;
        self.report_left(left, "agent_released");
        self.report("session.released", json!({ "reason": reason }), None);
        self.publish(&Event::AgentReleased { reason });
    }

    /// Reports messages that wait without an agent to type them for. Those of the engine come again with the next agent
    /// of the name.
    pub(super) fn report_left(&self, count: usize, reason: &'static str) {
        if count > 0 {
            self.publish(&Event::DeliveryDropped { count, reason });
        }
    }

    /// Deregisters the agent at the engine, removes it from the files that a later broker reads, and frees its name, in
    /// this order. The next agent of the name has the same id and the same folder, so nothing of this end may come
    /// after that start.
    pub(super) async fn leave(&self) {
        let services = &self.launch.services;
        // First: a binding that is under way hosts nothing after this.
        if let Some(agent_id) = self.launch.handle.binding.end() {
            services.link.unhost(self.name(), &agent_id);
        }
        self.launch.remove_ack_folder().await;
        let (roster, files, name) = (services.roster.clone(), services.project_files.clone(), self.name().to_owned());
        let removed = tokio::task::spawn_blocking(move || {
            files.remove(&name);
            roster.remove(&name)
        })
        .await;
        if let Ok(Err(error)) = removed {
            tracing::error!(
                agent.name = self.name(),
                error = format!("{error:#}"),
                "failed to store the end of an agent, retrying; a crash before that restarts it"
            );
        }
        services.verification.forget_agent(self.name());
        services.agents.remove(self.name());
    }
}

impl Launch {
    /// Removes the agent's ack files, which no delivery awaits any more, and their folder if it is empty then.
    pub(super) async fn remove_ack_folder(&self) {
        let Some(folder) = self.ack_folder.clone() else { return };
        let removed = tokio::task::spawn_blocking(move || {
            folder.clear();
            folder.remove_empty();
        })
        .await;
        if let Err(error) = removed {
            tracing::error!(agent.name = self.handle.spec.name, %error, "the folder of ack files was not removed");
        }
    }
}

/// Removes what the processes of an agent that does not run again have left in its project: ack files, and their folder
/// if it is empty then. Blocks.
pub(crate) fn remove_left_acks(spec: &AgentSpec, working_directory: &Path, account: Option<Arc<Account>>) {
    let folder = AckFolder::for_agent(spec.cwd.as_deref().unwrap_or(working_directory), &spec.name, account);
    folder.clear();
    folder.remove_empty();
}
