//! [`Webhook`]: a token that may only post to one channel.

use chrono::{DateTime, Utc};

use crate::{ChannelId, WebhookId};

/// Inbound webhook of a channel.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Webhook {
    pub webhook_id: WebhookId,
    pub name: String,
    pub channel_id: ChannelId,
    pub channel_name: String,
    pub created_at: DateTime<Utc>,
}
