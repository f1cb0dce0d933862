//! [`Members`]: the workspaces of this broker. Each has a node and a socket at the engine; agents of all of them run
//! side by side under names that are unique in the broker.

use std::sync::Arc;

use futures::future::join_all;

use super::Spawner;
use crate::{engine::Identity, engine_link::EngineLink};

/// The workspaces, the default one first. Never empty. Clones are the same.
#[derive(Clone)]
pub(crate) struct Members {
    all: Arc<[Spawner]>,
}

impl Members {
    /// # Panics
    /// Without a workspace.
    pub(crate) fn new(all: Vec<Spawner>) -> Self {
        assert!(!all.is_empty(), "a broker has joined a workspace");
        Self { all: all.into() }
    }

    /// The workspace of whatever names none.
    pub(crate) fn default_workspace(&self) -> &Spawner {
        &self.all[0]
    }

    /// The workspace with this id and this alias, as far as they are given.
    pub(crate) fn find(&self, id: Option<&str>, alias: Option<&str>) -> Option<&Spawner> {
        self.all.iter().find(|member| {
            let identity = &member.services().identity;
            id.is_none_or(|id| id == identity.workspace_id)
                && alias.is_none_or(|alias| Some(alias) == identity.workspace_alias.as_deref())
        })
    }

    /// The workspace with this name, an id or an alias; the default one without a name.
    pub(crate) fn named(&self, name: Option<&str>) -> Option<&Spawner> {
        match name {
            // Ids first: an alias may look like the id of another workspace.
            Some(name) => self.find(Some(name), None).or_else(|| self.find(None, Some(name))),
            None => Some(self.default_workspace()),
        }
    }

    /// The broker as each workspace knows it, the default one first.
    pub(crate) fn identities(&self) -> impl Iterator<Item = &Identity> {
        self.all.iter().map(|member| member.services().identity.as_ref())
    }

    /// Returns whether all nodes are registered.
    pub(crate) fn are_connected(&self) -> bool {
        self.all.iter().all(|member| member.services().link.is_up())
    }

    /// The sockets of the workspaces.
    pub(crate) fn links(&self) -> impl Iterator<Item = &EngineLink> {
        self.all.iter().map(|member| &member.services().link)
    }

    /// Says goodbye to the engine in all workspaces.
    pub(crate) async fn leave(&self) {
        join_all(self.all.iter().map(|member| member.services().link.leave())).await;
    }
}
