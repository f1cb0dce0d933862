//! Bodies of the routes for inbound webhooks.

use relay_domain::{ChannelId, WebhookId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::field::{Id, Timestamp};

/// `POST /v1/webhooks`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateWebhookBody {
    /// What it is called; after its channel when absent.
    #[serde(default)]
    pub name: Option<String>,
    /// Where it posts, by name.
    pub channel: String,
}

/// A webhook.
#[derive(Debug, Serialize, ToSchema)]
pub struct Webhook {
    /// The webhook.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub id: WebhookId,
    /// The same.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub webhook_id: WebhookId,
    /// Its workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// What it is called.
    pub name: String,
    /// Where it posts, by name.
    pub channel: String,
    /// The same.
    pub channel_name: String,
    /// Where it posts.
    #[schema(value_type = Id)]
    pub channel_id: ChannelId,
    /// The path that is called.
    pub url: String,
    /// Always true: a deleted one is gone.
    pub is_active: bool,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Answer to `POST /v1/webhooks`.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedWebhook {
    /// The webhook.
    #[serde(flatten)]
    pub webhook: Webhook,
    /// Its token, shown this once.
    pub token: String,
}

/// `POST /v1/hooks/:id`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct HookBody {
    /// The text.
    #[serde(default)]
    pub text: Option<String>,
    /// The text, under its other name.
    #[serde(default)]
    pub message: Option<String>,
    /// Rich blocks.
    #[serde(default)]
    pub blocks: Option<Value>,
    /// Which system it comes from.
    #[serde(default)]
    pub source: Option<String>,
    /// Under which name it is shown.
    #[serde(default)]
    pub author: Option<String>,
    /// Whatever else.
    #[serde(default)]
    pub payload: Option<Value>,
    /// The payload of systems that know none of these fields.
    #[serde(flatten)]
    #[schema(ignore)]
    pub rest: Map<String, Value>,
}

/// Answer to `POST /v1/hooks/:id`.
#[derive(Debug, Serialize, ToSchema)]
pub struct HookAnswer {
    /// The message.
    pub message_id: String,
    /// The webhook.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub webhook_id: WebhookId,
    /// Where it was posted, by name.
    pub channel: String,
    /// Its text.
    pub text: String,
    /// Which system it came from.
    pub source: Option<String>,
    /// Under which name it is shown.
    pub author: String,
    /// When it was accepted.
    pub created_at: Timestamp,
}
