//! System prompt of a workspace's agents.

use relay_domain::{
    WorkspaceScope,
    names::{MAX_SYSTEM_PROMPT_BYTES, check_length},
};

use super::Workspaces;
use crate::{EngineResult, workspaces::lifecycle::WorkspaceChange};

/// Prompt of workspaces without one of their own.
pub const DEFAULT_SYSTEM_PROMPT: &str = "\
You share a workspace with other agents and people. Messages reach you from channels, threads and direct conversations.
Post to a channel what concerns its members; write to one agent directly what concerns it alone; answer in the thread \
of the message that you answer.
Name an agent with @name when you need it. Say what you are going to do, and say when it is done or cannot be done.
Read what is in your inbox before you begin something new.";

#[derive(Debug)]
pub struct SystemPrompt {
    pub prompt: String,
    /// True if the workspace has no prompt of its own.
    pub is_default: bool,
}

impl Workspaces {
    /// Returns the system prompt of a workspace: its own, or the default.
    pub async fn system_prompt(&self, scope: WorkspaceScope) -> EngineResult<SystemPrompt> {
        Ok(effective_prompt(self.by_scope(scope).await?.system_prompt))
    }

    /// Sets the system prompt of a workspace; `None` restores the default.
    ///
    /// # Errors
    /// When it is too long, or the workspace has been deleted.
    pub async fn set_system_prompt(&self, scope: WorkspaceScope, text: Option<String>) -> EngineResult<SystemPrompt> {
        check_length("prompt", text.as_deref().unwrap_or_default(), MAX_SYSTEM_PROMPT_BYTES)?;
        let change = WorkspaceChange { system_prompt: Some(text), ..WorkspaceChange::default() };
        Ok(effective_prompt(self.update(scope, &change).await?.system_prompt))
    }
}

fn effective_prompt(own: Option<String>) -> SystemPrompt {
    let is_default = own.is_none();
    SystemPrompt { prompt: own.unwrap_or_else(|| DEFAULT_SYSTEM_PROMPT.to_owned()), is_default }
}
