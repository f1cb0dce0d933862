//! Rights inside a workspace: a pure decision for each operation that one agent may be refused and another not.
//!
//! [`RightSettings`] are the settings of a workspace (its policy) or of one agent (its overrides). [`Rights`] are the
//! settings in force for one agent, and [`check`] compares them with an [`Operation`]. The engine calls it in one
//! place per use case; docs/protocol/rest.md, "Rights", has the same rules as a table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::AgentId;

/// Right of an agent. The workspace key has all of them.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Right {
    /// Posting and editing messages.
    Send,
    /// Joining and creating channels.
    Join,
    /// Starting agents on nodes.
    Spawn,
    /// Creating event subscriptions, and receiving their calls.
    Subscribe,
    /// Creating triggers.
    CreateTriggers,
    /// Defining actions, and taking over those whose handler is not live.
    DefineActions,
    /// Releasing itself and the agents that it spawned.
    ReleaseSpawned,
    /// Being named as the author of what a broker node posts.
    PostThroughNode,
    /// Releasing and deleting every agent.
    ReleaseAny,
    /// Reading every invocation.
    ReadAnyInvocation,
    /// Receiving every event of the workspace, and managing every subscription.
    ReadAllEvents,
    /// Managing every trigger, and creating triggers of actions that it may not invoke itself.
    TriggerAny,
}

crate::columns::stored_name!(Right);

impl Right {
    /// Returns whether agents have the right unless a setting says otherwise.
    #[must_use]
    pub const fn is_default(self) -> bool {
        match self {
            Self::Send
            | Self::Join
            | Self::Spawn
            | Self::Subscribe
            | Self::CreateTriggers
            | Self::DefineActions
            | Self::ReleaseSpawned
            | Self::PostThroughNode => true,
            Self::ReleaseAny | Self::ReadAnyInvocation | Self::ReadAllEvents | Self::TriggerAny => false,
        }
    }
}

/// Settings of rights: the policy of a workspace, or the overrides of one agent. A right without a setting is decided
/// by the next level: overrides, policy, default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RightSettings(BTreeMap<Right, bool>);

impl RightSettings {
    /// Returns the setting of a right.
    #[must_use]
    pub fn get(&self, right: Right) -> Option<bool> {
        self.0.get(&right).copied()
    }

    /// Returns whether there are no settings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Change of settings, merged key by key; `None` removes a setting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RightChanges(BTreeMap<Right, Option<bool>>);

impl FromIterator<(Right, bool)> for RightSettings {
    fn from_iter<I: IntoIterator<Item = (Right, bool)>>(settings: I) -> Self {
        Self(settings.into_iter().collect())
    }
}

/// Rights in force for one agent.
#[derive(Clone, Copy, PartialEq, Eq)]
// A bit for each right, by its place in the declaration. Nothing stores the number, so that places may change.
pub struct Rights(u16);

impl Rights {
    /// Combines the settings of a workspace and of one of its agents.
    #[must_use]
    pub fn new(policy: &RightSettings, overrides: &RightSettings) -> Self {
        let granted = |right: Right| overrides.get(right).or(policy.get(right)).unwrap_or(right.is_default());
        Self(Right::ALL.iter().filter(|right| granted(**right)).fold(0, |set, right| set | 1 << *right as u16))
    }

    /// Returns whether the agent has the right.
    #[must_use]
    pub const fn has(self, right: Right) -> bool {
        self.0 & (1 << right as u16) != 0
    }
}

impl Default for Rights {
    fn default() -> Self {
        Self::new(&RightSettings::default(), &RightSettings::default())
    }
}

impl std::fmt::Debug for Rights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(Right::ALL.iter().filter(|right| self.has(**right))).finish()
    }
}

/// Caller of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Actor {
    /// Holder of the workspace key, or the engine in the name of the workspace.
    Workspace,
    Agent {
        /// Id of the agent.
        id: AgentId,
        /// Rights in force for it.
        rights: Rights,
    },
    /// Caller that is no agent, and has no rights.
    Outsider,
}

/// Operation that rights restrict, with the facts that decide it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Posting or editing a message, opening a conversation.
    Send,
    /// Joining or creating a channel.
    Join,
    /// Starting an agent.
    Spawn,
    /// Creating an event subscription.
    Subscribe,
    /// Reading, replaying or deleting an event subscription.
    ManageSubscription {
        /// Agent that created it; `None` for the workspace key.
        owner: Option<AgentId>,
    },
    /// Creating a trigger.
    CreateTrigger,
    /// Changing or deleting a trigger.
    ManageTrigger {
        /// Agent that created it; `None` for the workspace key.
        creator: Option<AgentId>,
    },
    /// Defining an action, or taking over one whose handler is not live.
    DefineAction,
    /// Replacing or deleting an action.
    ManageAction {
        /// Agent that handles it; `None` if a node does.
        handler: Option<AgentId>,
    },
    /// Ending an agent.
    Release {
        /// Agent to end.
        agent: AgentId,
        /// Agent that spawned it.
        spawned_by: Option<AgentId>,
    },
    /// Deleting an agent at once, without its node.
    Delete {
        /// Agent that spawned it.
        spawned_by: Option<AgentId>,
    },
    /// Reading an invocation.
    ReadInvocation {
        /// Agent that called; `None` for the workspace key.
        caller: Option<AgentId>,
        /// Agent that handles it; `None` if a node does.
        handler: Option<AgentId>,
    },
    /// Posting through a node in the name of the actor.
    PostThroughNode {
        /// Node that posts.
        node: PostingNode,
    },
}

/// Node that posts in the name of an agent, as it relates to that agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostingNode {
    /// Broker node, which may post for every agent of the workspace.
    Broker,
    /// Direct node of the agent.
    Own,
    /// Direct node of another agent.
    OfAnother,
}

/// Refusal of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The agent may not post.
    Send,
    /// The agent may not join channels.
    Join,
    /// The agent may not spawn.
    Spawn,
    /// The agent may not subscribe.
    Subscribe,
    /// The subscription is another caller's.
    SubscriptionNotOwn,
    /// The agent may not create triggers.
    CreateTrigger,
    /// The trigger is another caller's.
    TriggerNotOwn,
    /// The agent may not define actions.
    DefineAction,
    /// Another agent, or a node, handles the action.
    NotHandler,
    /// The agent may release no agent.
    Release,
    /// The agent spawned neither itself nor what it wants to end.
    NotSpawnedByCaller,
    /// The agent is neither caller nor handler of the invocation.
    InvocationNotOwn,
    /// The node may not post for that agent.
    PostThroughNode,
}

impl Refusal {
    /// Returns the stable code for clients and events.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Send => "send_denied",
            Self::Join => "join_denied",
            Self::Spawn => "spawn_denied",
            Self::Subscribe => "subscribe_denied",
            Self::SubscriptionNotOwn => "subscription_not_own",
            Self::CreateTrigger => "trigger_denied",
            Self::TriggerNotOwn => "trigger_not_own",
            Self::DefineAction => "define_actions_denied",
            // Older than the rights.
            Self::NotHandler => "forbidden",
            Self::Release => "release_denied",
            Self::NotSpawnedByCaller => "agent_not_spawned_by_caller",
            Self::InvocationNotOwn => "invocation_not_own",
            Self::PostThroughNode => "node_post_denied",
        }
    }

    /// Returns the right that would permit the operation. `None` if no setting does.
    #[must_use]
    pub const fn right(self) -> Option<Right> {
        Some(match self {
            Self::Send => Right::Send,
            Self::Join => Right::Join,
            Self::Spawn => Right::Spawn,
            Self::Subscribe => Right::Subscribe,
            Self::SubscriptionNotOwn => Right::ReadAllEvents,
            Self::CreateTrigger => Right::CreateTriggers,
            Self::TriggerNotOwn => Right::TriggerAny,
            Self::DefineAction => Right::DefineActions,
            Self::NotHandler => return None,
            Self::Release => Right::ReleaseSpawned,
            Self::NotSpawnedByCaller => Right::ReleaseAny,
            Self::InvocationNotOwn => Right::ReadAnyInvocation,
            Self::PostThroughNode => Right::PostThroughNode,
        })
    }
}

/// Decides an operation.
///
/// # Errors
/// When the actor may not do it.
pub fn check(actor: Actor, operation: Operation) -> Result<(), Refusal> {
    let (id, rights) = match actor {
        Actor::Workspace => return Ok(()),
        Actor::Agent { id, rights } => (Some(id), rights),
        Actor::Outsider => (None, Rights(0)),
    };
    // `None` means the workspace key in an operation and an outsider in the actor: the two must not be equal.
    let is_actor = |agent: Option<AgentId>| agent.is_some() && agent == id;
    let allow = |allowed: bool, refusal: Refusal| if allowed { Ok(()) } else { Err(refusal) };
    match operation {
        Operation::Send => allow(rights.has(Right::Send), Refusal::Send),
        Operation::Join => allow(rights.has(Right::Join), Refusal::Join),
        Operation::Spawn => allow(rights.has(Right::Spawn), Refusal::Spawn),
        Operation::Subscribe => allow(rights.has(Right::Subscribe), Refusal::Subscribe),
        Operation::ManageSubscription { owner } => {
            allow(is_actor(owner) || rights.has(Right::ReadAllEvents), Refusal::SubscriptionNotOwn)
        }
        Operation::CreateTrigger => allow(rights.has(Right::CreateTriggers), Refusal::CreateTrigger),
        Operation::ManageTrigger { creator } => {
            allow(is_actor(creator) || rights.has(Right::TriggerAny), Refusal::TriggerNotOwn)
        }
        Operation::DefineAction => allow(rights.has(Right::DefineActions), Refusal::DefineAction),
        Operation::ManageAction { handler } => allow(is_actor(handler), Refusal::NotHandler),
        Operation::Release { agent, spawned_by } => {
            let is_own = is_actor(Some(agent)) || is_actor(spawned_by);
            match (rights.has(Right::ReleaseAny), is_own, rights.has(Right::ReleaseSpawned)) {
                (true, ..) | (false, true, true) => Ok(()),
                (false, true, false) => Err(Refusal::Release),
                (false, false, _) => Err(Refusal::NotSpawnedByCaller),
            }
        }
        Operation::Delete { spawned_by } => {
            let spawned = is_actor(spawned_by) && rights.has(Right::ReleaseSpawned);
            allow(spawned || rights.has(Right::ReleaseAny), Refusal::NotSpawnedByCaller)
        }
        Operation::ReadInvocation { caller, handler } => {
            let is_own = is_actor(caller) || is_actor(handler);
            allow(is_own || rights.has(Right::ReadAnyInvocation), Refusal::InvocationNotOwn)
        }
        Operation::PostThroughNode { node } => {
            let permitted = match node {
                PostingNode::Broker => rights.has(Right::PostThroughNode),
                PostingNode::Own => id.is_some(),
                PostingNode::OfAnother => false,
            };
            allow(permitted, Refusal::PostThroughNode)?;
            allow(rights.has(Right::Send), Refusal::Send)
        }
    }
}

#[cfg(test)]
#[path = "rights_tests.rs"]
mod tests;
