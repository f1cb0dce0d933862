//! Inbound webhooks: an address and a token with which anything that can send a request posts to a channel.

use chrono::{DateTime, Utc};
use relay_domain::{
    ChannelId, WebhookId, WorkspaceScope, event,
    names::{MAX_AGENT_NAME_BYTES, check_name},
    plan::Ceiling,
    subscription::MAX_PER_WORKSPACE,
    token::{TokenHash, TokenKind},
};
pub use relay_store::webhooks::WebhookRow;
use relay_store::{events::NewEvent, webhooks::NewWebhook};
use serde_json::{Map, Value, json};

use crate::{Engine, EngineError, EngineResult, send::Draft};

/// Random bytes in a webhook's token.
const TOKEN_BYTES: usize = 24;

/// A webhook with its token.
#[derive(Debug)]
pub struct CreatedWebhook {
    /// The webhook.
    pub row: WebhookRow,
    /// Its token, shown this once.
    pub token: String,
}

/// Who calls a webhook's address: whoever has its token.
#[derive(Debug, Clone)]
pub struct HookCaller {
    /// The workspace.
    pub scope: WorkspaceScope,
    /// The webhook.
    pub webhook: WebhookRow,
}

/// What a call says.
#[derive(Debug, Default)]
pub struct HookCall {
    /// The text.
    pub text: Option<String>,
    /// Rich blocks: an array.
    pub blocks: Option<Value>,
    /// Which system it comes from.
    pub source: Option<String>,
    /// Under which name it is shown.
    pub author: Option<String>,
    /// Whatever else.
    pub payload: Option<Value>,
}

/// What became of a call.
#[derive(Debug)]
pub struct HookAnswer {
    /// The message.
    pub message_id: i64,
    /// Its text.
    pub text: String,
    /// Under which name it is shown.
    pub author: String,
    /// Which system it came from.
    pub source: Option<String>,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
}

impl Engine {
    /// Makes a webhook that posts to a channel.
    ///
    /// # Errors
    /// When there is no such channel, it is archived, the name is out of bounds, or there are too many.
    pub async fn create_webhook(
        &self,
        scope: WorkspaceScope,
        name: Option<&str>,
        channel: &str,
    ) -> EngineResult<CreatedWebhook> {
        let channel = self.open_channel(scope, channel).await?;
        let name = name.map_or_else(|| format!("webhook-{}", channel.name), str::to_owned);
        check_name("name", &name, MAX_AGENT_NAME_BYTES)?;
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::NoRandomness)?;
        let token = format!("{}{}", TokenKind::Webhook.prefix(), hex::encode(random));
        let new = NewWebhook {
            webhook_id: WebhookId::new(self.next_id()),
            name: &name,
            channel_id: channel.channel_id,
            token: TokenHash::of(&token),
            at: self.now(),
        };
        let ceiling = self.ceiling(scope, Ceiling::Webhooks).await?.unwrap_or(MAX_PER_WORKSPACE);
        if !self.store().create_webhook(scope, &new, ceiling.min(MAX_PER_WORKSPACE)).await? {
            return Err(EngineError::PlanLimitExceeded(Ceiling::Webhooks));
        }
        let (webhook_id, channel_id, created_at) = (new.webhook_id, channel.channel_id, new.at);
        let row = WebhookRow { webhook_id, name, channel_id, channel_name: channel.name, created_at };
        Ok(CreatedWebhook { row, token })
    }

    /// The webhooks of a workspace, oldest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn webhooks(&self, scope: WorkspaceScope) -> EngineResult<Vec<WebhookRow>> {
        Ok(self.store().webhooks(scope, MAX_PER_WORKSPACE).await?)
    }

    /// Deletes a webhook. Its token is dead when this returns.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn delete_webhook(&self, scope: WorkspaceScope, webhook: WebhookId) -> EngineResult<()> {
        self.store().delete_webhook(scope, webhook).await?.map(|_| ()).ok_or(EngineError::WebhookNotFound)
    }

    /// Who holds the token of a webhook. Not remembered: a deleted one is dead at once, everywhere.
    ///
    /// # Errors
    /// When the token is none, or another webhook's.
    pub async fn authenticate_hook(&self, token: &str, webhook: &str) -> EngineResult<HookCaller> {
        let invalid = || EngineError::UnknownToken { kind: TokenKind::Webhook };
        let found = self.store().webhook_of_token(&TokenHash::of(token)).await?;
        let (workspace, row) = found.ok_or_else(invalid)?;
        if webhook.parse() != Ok(row.webhook_id) {
            return Err(invalid());
        }
        let scope = WorkspaceScope::from_verified_token(workspace);
        self.refuse_suspended(scope)?;
        Ok(HookCaller { scope, webhook: row })
    }

    /// Posts what a call says to the webhook's channel.
    ///
    /// # Errors
    /// When a field is out of bounds, the channel is archived, or the message cannot be committed.
    pub async fn receive_hook(&self, caller: &HookCaller, call: HookCall) -> EngineResult<HookAnswer> {
        let hook = &caller.webhook;
        let source = call.source.filter(|source| !source.trim().is_empty());
        if let Some(source) = &source {
            check_name("source", source, MAX_AGENT_NAME_BYTES)?;
        }
        let author = call.author.filter(|author| !author.trim().is_empty());
        let author = author.or_else(|| source.clone()).unwrap_or_else(|| hook.name.clone());
        check_name("author", &author, MAX_AGENT_NAME_BYTES)?;
        let text = call.text.filter(|text| !text.is_empty()).unwrap_or_else(|| {
            let payload = call.payload.as_ref().map_or_else(|| "{}".to_owned(), Value::to_string);
            format!("Webhook {}: {payload}", hook.name)
        });
        let mut data = Map::new();
        data.insert("webhook_id".to_owned(), json!(hook.webhook_id));
        if let Some(source) = &source {
            data.insert("source".to_owned(), json!(source));
        }
        if let Some(payload) = call.payload {
            data.insert("payload".to_owned(), payload);
        }
        let draft =
            Draft { text: text.clone(), blocks: call.blocks, data: Some(Value::Object(data)), ..Draft::default() };
        // The message's id is filled in by the commit that takes it.
        let received = json!({
            "webhook_id": hook.webhook_id,
            "channel": hook.channel_name,
            "message": { "id": null, "text": text, "source": source, "author": author },
        });
        let received = NewEvent::new(event::WEBHOOK_RECEIVED, received)
            .in_channel(ChannelId::new(hook.channel_id.get()), &hook.channel_name);
        let posted = self.post_as_webhook(caller, &author, draft, vec![received]).await?;
        Ok(HookAnswer {
            message_id: posted.message.message_id,
            text,
            author,
            source,
            created_at: posted.message.created_at,
        })
    }
}
