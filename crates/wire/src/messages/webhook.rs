//! Request and response bodies of the inbound webhook routes.

use relay_domain::{ChannelId, InvocationId, JsonText, WebhookId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::field::{Id, Timestamp};

/// Body of `POST /v1/webhooks`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateWebhookBody {
    /// Name of the webhook; the channel's name by default.
    #[serde(default)]
    pub name: Option<String>,
    /// Name of the channel to post to.
    pub channel: String,
}

/// Inbound webhook.
#[derive(Debug, Serialize, ToSchema)]
pub struct Webhook {
    /// Id of the webhook.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub id: WebhookId,
    /// Id of the webhook, as in `id`.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub webhook_id: WebhookId,
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Name of the webhook.
    pub name: String,
    /// Name of the channel that it posts to.
    pub channel: String,
    /// Name of the channel, as in `channel`.
    pub channel_name: String,
    /// Id of the channel that it posts to.
    #[schema(value_type = Id)]
    pub channel_id: ChannelId,
    /// Path to call.
    pub url: String,
    /// Always true; deleted webhooks are not returned.
    pub is_active: bool,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Response of `POST /v1/webhooks`.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedWebhook {
    /// The webhook itself.
    #[serde(flatten)]
    pub webhook: Webhook,
    /// Bearer token, shown only in this response.
    pub token: String,
}

/// Body of `POST /v1/hooks/:id`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct HookBody {
    /// Text of the message.
    #[serde(default)]
    pub text: Option<String>,
    /// Alternative name of `text`.
    #[serde(default)]
    pub message: Option<String>,
    /// Rich blocks, passed through.
    #[serde(default)]
    #[schema(value_type = Option<Value>)]
    pub blocks: Option<JsonText>,
    /// Name of the calling system.
    #[serde(default)]
    pub source: Option<String>,
    /// Display name of the author.
    #[serde(default)]
    pub author: Option<String>,
    /// Free-form payload.
    #[serde(default)]
    #[schema(value_type = Option<Value>)]
    pub payload: Option<JsonText>,
    /// Payload of systems that use none of these fields. `invocation_id` or `metadata.invocation_id` beside them names the
    /// invocation that makes the call.
    #[serde(flatten)]
    #[schema(ignore)]
    pub rest: Map<String, Value>,
}

/// Metadata of the message that a call of a webhook becomes.
#[derive(Debug, Serialize)]
pub struct WebhookMetadata<'a> {
    /// Id of the webhook.
    pub webhook_id: WebhookId,
    /// Name of the calling system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<&'a str>,
    /// Payload of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload: Option<JsonText>,
    /// Id of the invocation that made the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invocation_id: Option<InvocationId>,
}

/// Response of `POST /v1/hooks/:id`.
#[derive(Debug, Serialize, ToSchema)]
pub struct HookAnswer {
    /// Id of the message.
    pub message_id: String,
    /// Id of the webhook.
    #[schema(value_type = String, example = "wh_243812004871278592")]
    pub webhook_id: WebhookId,
    /// Name of the channel.
    pub channel: String,
    /// Text of the message.
    pub text: String,
    /// Name of the calling system.
    pub source: Option<String>,
    /// Display name of the author.
    pub author: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
}
