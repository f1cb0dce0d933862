//! Authenticated callers: [`Credential`], [`AgentCaller`], [`NodeCaller`]. Made by authentication, taken by use cases.

use std::sync::Arc;

use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    access::{rights::Rights, token::TokenKind},
    agents::AgentKind,
    nodes::{NodeKind, NodeRole},
    observers::ObserverView,
};

use crate::{
    EngineError, EngineResult,
    error::BadCredential,
    observers::access::{ObserverAccess, full_view},
};

/// An authenticated caller.
#[derive(Debug, Clone)]
pub enum Credential {
    /// The holder of a workspace's key.
    Workspace {
        scope: WorkspaceScope,
    },
    Agent(AgentCaller),
    Node(NodeCaller),
    /// Observer token: reads within [`Credential::view`].
    Observer(ObserverAccess),
}

impl Credential {
    #[must_use]
    pub const fn scope(&self) -> WorkspaceScope {
        match self {
            Self::Workspace { scope } => *scope,
            Self::Agent(agent) => agent.scope,
            Self::Node(node) => node.scope,
            Self::Observer(observer) => observer.scope,
        }
    }

    /// Returns the part of the workspace that the caller may see. Callers other than observers see everything, except
    /// conversations without them.
    #[must_use]
    pub fn view(&self) -> &ObserverView {
        match self {
            Self::Observer(observer) => &observer.view,
            Self::Workspace { .. } | Self::Agent(_) | Self::Node(_) => full_view(),
        }
    }

    #[must_use]
    pub const fn agent_id(&self) -> Option<AgentId> {
        match self {
            Self::Agent(agent) => Some(agent.agent_id),
            Self::Workspace { .. } | Self::Node(_) | Self::Observer(_) => None,
        }
    }
}

/// An agent that calls with its own token.
#[derive(Debug, Clone)]
pub struct AgentCaller {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub name: Arc<str>,
    pub kind: AgentKind,
    /// Number of rotations of the token at authentication. The commit of a send checks it.
    pub token_generation: i64,
    /// The token was replaced, and is accepted for the workspace's grace.
    pub is_former_token: bool,
    pub rights: Rights,
}

impl AgentCaller {
    /// Refuses a former token where it would outlive its grace: a token that it creates does not end with it.
    ///
    /// # Errors
    /// As for a token that is revoked.
    pub(crate) fn refuse_former_token(&self) -> EngineResult<()> {
        if self.is_former_token {
            return Err(EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Agent }));
        }
        Ok(())
    }
}

/// A node that calls with its own token.
#[derive(Debug, Clone)]
pub struct NodeCaller {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    /// A node keeps its role and its kind.
    pub role: NodeRole,
    pub kind: NodeKind,
}

impl NodeCaller {
    /// Returns whether the node is one agent's own connection.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.role == NodeRole::Direct
    }
}
