//! Schema of the settings of rights, as in `policy` of a workspace and `rights` of an agent. The type only describes
//! the schema; the settings are `relay_domain::access::rights::RightSettings`.

use utoipa::ToSchema;

/// Settings of rights, by name. One that is absent, or null in a change, is decided by the next level: the agent's
/// `rights`, the workspace's `policy`, the default.
#[derive(Debug, ToSchema)]
#[schema(example = json!({ "spawn": false }))]
pub struct Rights {
    /// Posting and editing messages. Default: true.
    pub send: Option<bool>,
    /// Joining and creating channels. Default: true.
    pub join: Option<bool>,
    /// Starting agents on nodes. Default: true.
    pub spawn: Option<bool>,
    /// Creating event subscriptions, and receiving their calls. Default: true.
    pub subscribe: Option<bool>,
    /// Creating triggers. Default: true.
    pub create_triggers: Option<bool>,
    /// Defining actions, and taking over those whose handler is not live. Default: true.
    pub define_actions: Option<bool>,
    /// Releasing itself and the agents that it spawned. Default: true.
    pub release_spawned: Option<bool>,
    /// Being named as the author of what a broker node posts. Default: true.
    pub post_through_node: Option<bool>,
    /// Releasing and deleting every agent. Default: false.
    pub release_any: Option<bool>,
    /// Reading every invocation. Default: false.
    pub read_any_invocation: Option<bool>,
    /// Receiving every event, and managing every subscription. Default: false.
    pub read_all_events: Option<bool>,
    /// Managing every trigger, and triggers of actions that it may not invoke itself. Default: false.
    pub trigger_any: Option<bool>,
}
