//! What agents of a workspace are told first.

use relay_domain::{
    WorkspaceScope,
    names::{MAX_SYSTEM_PROMPT_BYTES, check_length},
};

use crate::{Engine, EngineResult, workspaces::WorkspaceChange};

/// What agents are told where the workspace says nothing else.
pub const DEFAULT_SYSTEM_PROMPT: &str = "\
You share a workspace with other agents and people. Messages reach you from channels, threads and direct conversations.
Post to a channel what concerns its members; write to one agent directly what concerns it alone; answer in the thread \
of the message that you answer.
Name an agent with @name when you need it. Say what you are going to do, and say when it is done or cannot be done.
Read what is in your inbox before you begin something new.";

/// A workspace's system prompt.
#[derive(Debug)]
pub struct SystemPrompt {
    /// The text.
    pub prompt: String,
    /// Whether the workspace has none of its own.
    pub is_default: bool,
}

impl Engine {
    /// The system prompt of a workspace: its own, or the default.
    ///
    /// # Errors
    /// When the workspace is gone.
    pub async fn system_prompt(&self, scope: WorkspaceScope) -> EngineResult<SystemPrompt> {
        Ok(prompt(self.workspace(scope).await?.system_prompt))
    }

    /// Sets the system prompt of a workspace; `None` goes back to the default.
    ///
    /// # Errors
    /// When it is too long, or the workspace is gone.
    pub async fn set_system_prompt(&self, scope: WorkspaceScope, text: Option<String>) -> EngineResult<SystemPrompt> {
        check_length("prompt", text.as_deref().unwrap_or_default(), MAX_SYSTEM_PROMPT_BYTES)?;
        let change = WorkspaceChange { system_prompt: Some(text), ..WorkspaceChange::default() };
        Ok(prompt(self.update_workspace(scope, &change).await?.system_prompt))
    }
}

fn prompt(own: Option<String>) -> SystemPrompt {
    let is_default = own.is_none();
    SystemPrompt { prompt: own.unwrap_or_else(|| DEFAULT_SYSTEM_PROMPT.to_owned()), is_default }
}
