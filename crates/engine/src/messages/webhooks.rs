//! Inbound webhooks: URLs with a token through which other systems post to a channel.

use chrono::{DateTime, Utc};
use relay_domain::{
    InvocationId, JsonText, MessageId, WebhookId, WorkspaceScope,
    access::{
        rights::Actor,
        token::{TokenHash, TokenKind},
    },
    agents::AgentKind,
    events::kind,
    messages::Webhook,
    names::{MAX_AGENT_NAME_BYTES, check_name},
    subscriptions::MAX_PER_WORKSPACE,
    workspaces::plan::Quota,
};
use relay_store::{
    events::Event,
    messages::webhooks::{NewWebhook, WebhookLookup, webhook_agent},
};
use relay_wire::{
    events::data::{WebhookMessage, WebhookReceived},
    field::ToValue as _,
    messages::webhook::WebhookMetadata,
};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    error::{BadCredential, Fault, Limit, Missing},
    messages::posting::{Draft, PostRequest, Sender, Target},
};

const TOKEN_BYTES: usize = 24;

#[derive(Debug)]
pub struct CreatedWebhook {
    pub row: Webhook,
    /// Shown this once.
    pub token: String,
}

/// Authenticated caller of a webhook.
#[derive(Debug, Clone)]
pub struct WebhookCaller {
    pub scope: WorkspaceScope,
    pub webhook: Webhook,
}

/// Body of a webhook call.
#[derive(Debug, Default)]
pub struct WebhookCall {
    pub text: Option<String>,
    /// Rich blocks: an array.
    pub blocks: Option<JsonText>,
    pub source: Option<String>,
    pub author: Option<String>,
    /// Any other JSON.
    pub payload: Option<JsonText>,
    /// Invocation that makes the call, as it says.
    pub invocation: Option<InvocationId>,
}

/// Result of a webhook call.
#[derive(Debug)]
pub struct HookAnswer {
    pub message_id: MessageId,
    pub text: String,
    pub author: String,
    pub source: Option<String>,
    pub created_at: DateTime<Utc>,
}

impl Messages {
    /// Creates a webhook that posts to a channel.
    ///
    /// # Errors
    /// When there is no such channel, it is archived, the name is out of bounds, or there are too many webhooks.
    pub async fn create_webhook(
        &self,
        scope: WorkspaceScope,
        name: Option<&str>,
        channel: &str,
    ) -> EngineResult<CreatedWebhook> {
        let channel = self.channels.open_channel(scope, channel).await?;
        let name = name.map_or_else(|| format!("webhook-{}", channel.name), str::to_owned);
        check_name("name", &name, MAX_AGENT_NAME_BYTES)?;
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let token = format!("{}{}", TokenKind::Webhook.prefix(), hex::encode(random));
        let new = NewWebhook {
            webhook_id: WebhookId::new(self.core.next_id()),
            name: &name,
            channel_id: channel.channel_id,
            token: TokenHash::from_token(&token),
            at: self.core.now(),
        };
        // An unlimited quota leaves the fixed bound.
        let quota = self.quotas.limit(scope, Quota::Webhooks).await?.unwrap_or(MAX_PER_WORKSPACE);
        // Whatever a plan allows: a list shows no more of them.
        if !self.core.store.create_webhook(scope, &new, quota.min(MAX_PER_WORKSPACE)).await? {
            return Err(EngineError::LimitExceeded(Limit::Quota(Quota::Webhooks)));
        }
        let (webhook_id, channel_id, created_at) = (new.webhook_id, channel.channel_id, new.at);
        let row = Webhook { webhook_id, name, channel_id, channel_name: channel.name, created_at };
        Ok(CreatedWebhook { row, token })
    }

    /// Lists the webhooks of a workspace, oldest first.
    pub async fn webhooks(&self, scope: WorkspaceScope) -> EngineResult<Vec<Webhook>> {
        Ok(self.core.store.webhooks(scope, MAX_PER_WORKSPACE).await?)
    }

    /// Deletes a webhook. Its token is revoked when this returns.
    pub async fn delete_webhook(&self, scope: WorkspaceScope, webhook: WebhookId) -> EngineResult<()> {
        self.core.store.delete_webhook(scope, webhook).await?.map(|_| ()).ok_or(EngineError::NotFound(Missing::Webhook))
    }

    /// Authenticates the token of a webhook. Not cached: a deleted webhook is refused at once, everywhere.
    ///
    /// # Errors
    /// When the token is unknown, or another webhook's.
    pub async fn authenticate_webhook(&self, token: &str, webhook: &str) -> EngineResult<WebhookCaller> {
        let invalid = || EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Webhook });
        let (workspace, row) = match self.core.store.webhook_by_token(&TokenHash::from_token(token)).await? {
            WebhookLookup::Valid(workspace, row) => (workspace, row),
            WebhookLookup::WorkspaceExpired => {
                return Err(EngineError::Unauthenticated(BadCredential::WorkspaceExpired));
            }
            WebhookLookup::Unknown => return Err(invalid()),
        };
        if webhook.parse() != Ok(row.webhook_id) {
            return Err(invalid());
        }
        let scope = WorkspaceScope::from_verified_token(workspace);
        self.suspensions.check_not_suspended(scope)?;
        Ok(WebhookCaller { scope, webhook: row })
    }

    /// Posts the contents of a call to the webhook's channel.
    ///
    /// # Errors
    /// When a field is out of bounds, the channel is archived, or the message cannot be committed.
    pub async fn receive_webhook_call(&self, caller: &WebhookCaller, call: WebhookCall) -> EngineResult<HookAnswer> {
        let hook = &caller.webhook;
        let source = call.source.filter(|source| !source.trim().is_empty());
        if let Some(source) = &source {
            check_name("source", source, MAX_AGENT_NAME_BYTES)?;
        }
        let author = call.author.filter(|author| !author.trim().is_empty());
        let author = author.or_else(|| source.clone()).unwrap_or_else(|| hook.name.clone());
        check_name("author", &author, MAX_AGENT_NAME_BYTES)?;
        let text = call.text.filter(|text| !text.is_empty()).unwrap_or_else(|| {
            let payload = call.payload.as_ref().map_or("{}", JsonText::get);
            format!("Webhook {}: {payload}", hook.name)
        });
        let metadata = WebhookMetadata {
            webhook_id: hook.webhook_id,
            source: source.as_deref(),
            payload: call.payload,
            invocation_id: call.invocation,
        };
        let draft = Draft {
            text: text.clone(),
            blocks: call.blocks,
            data: Some(JsonText::encode(&metadata)),
            ..Draft::default()
        };
        // The commit fills in the message's id.
        let message = WebhookMessage { id: None, text: &text, source: source.as_deref(), author: &author };
        let received = WebhookReceived { webhook_id: hook.webhook_id, channel: &hook.channel_name, message }.to_value();
        let received = Event::new(kind::WEBHOOK_RECEIVED, received).in_channel(hook.channel_id, &hook.channel_name);
        let sender = Sender {
            scope: caller.scope,
            agent_id: webhook_agent(caller.scope),
            name: author.as_str().into(),
            kind: AgentKind::System,
            actor: Actor::Workspace,
            // No agent's token was presented, so no rotation has to be noticed at the commit.
            token_generation: None,
            is_hidden: true,
        };
        let target = Target::Channel(hook.channel_name.clone());
        let arrived = self.next_arrival();
        let request = PostRequest { target, draft, key: None, events: vec![received], arrived };
        let posted = self.post_as(&sender, request).await?;
        Ok(HookAnswer { message_id: posted.message.id, text, author, source, created_at: posted.message.created_at })
    }
}
