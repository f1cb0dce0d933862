//! Event subscriptions: HTTP endpoints for events of a workspace. The worker delivers the events.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    SubscriptionDeliveryId, SubscriptionId, WorkspaceScope,
    access::rights::{Operation, Right},
    names::{MAX_AGENT_NAME_BYTES, strip_hash},
    subscriptions::{
        DeliveryStatus, EventFilter, MAX_EVENTS, MAX_HEADERS, MAX_PER_WORKSPACE, MAX_SECRET_BYTES, SignatureScheme,
        Subscription, SubscriptionDelivery, header_problem, is_subscribable,
        secrets::{SubscriptionSecrets, standard_webhooks_key},
    },
    workspaces::plan::Quota,
};
use relay_store::subscriptions::definitions::{EncryptedSecret, NewSubscription};

use super::Subscriptions;
use crate::{
    EngineError, EngineResult,
    access::callers::Credential,
    error::{Fault, Limit, Missing},
};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 200);

#[derive(Debug)]
pub struct SubscriptionRequest {
    /// Kinds of events; `*` is all of them.
    pub events: Vec<String>,
    /// Only events of this channel.
    pub channel: Option<String>,
    /// Only events that mention this agent.
    pub mentions: Option<String>,
    pub url: String,
    pub headers: BTreeMap<String, String>,
    pub secret: Option<String>,
    pub signature_scheme: Option<String>,
}

impl Subscriptions {
    /// Creates a subscription. An agent's shows what that agent may read, and is its own.
    ///
    /// # Errors
    /// When a field is invalid, the caller may not subscribe, or there are too many subscriptions.
    pub async fn create(&self, caller: &Credential, request: SubscriptionRequest) -> EngineResult<Subscription> {
        let scope = caller.scope();
        self.core.authorize(caller, Operation::Subscribe).await?;
        let id = SubscriptionId::new(self.core.next_id());
        let scheme = check_secret(request.secret.as_deref(), request.signature_scheme.as_deref())?;
        let events = check_events(request.events)?;
        let filter = build_filter(request.channel.as_deref(), request.mentions.as_deref())?;
        // For an early answer only: the addresses of the host are checked at each call.
        let allowed = self.egress.policy().check_url(&request.url);
        allowed.map_err(|refusal| invalid(format!("url cannot be called: {refusal}")))?;
        check_headers(&request.headers)?;
        let subscription = Subscription {
            id,
            events,
            filter,
            url: request.url,
            header_names: request.headers.keys().cloned().collect(),
            signature_scheme: scheme,
            created_at: self.core.now(),
            created_by: caller.agent_id(),
            disabled: None,
        };
        let secrets = SubscriptionSecrets { secret: request.secret, headers: request.headers };
        let secret = if secrets == SubscriptionSecrets::default() {
            None
        } else {
            // Strings always encode.
            let plain = serde_json::to_vec(&secrets).unwrap_or_default();
            Some(self.secrets.seal(&secret_context(scope, id), &plain)?)
        };
        let new = NewSubscription { subscription: &subscription, secret: secret.as_ref() };
        // An unlimited quota leaves the fixed bound.
        let quota = self.quotas.limit(scope, Quota::Subscriptions).await?.unwrap_or(MAX_PER_WORKSPACE);
        if !self.core.store.create_subscription(scope, &new, quota.min(MAX_PER_WORKSPACE)).await? {
            return Err(EngineError::LimitExceeded(Limit::Quota(Quota::Subscriptions)));
        }
        // Events of single deliveries are recorded only in watched workspaces. A failure is harmless: the worker marks
        // them too.
        if subscription.events.iter().any(|kind| kind == "*" || kind.starts_with("delivery."))
            && let Err(error) = self.core.watch_events(&[scope]).await
        {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "failed to mark a workspace as watched, the worker will"
            );
        }
        Ok(subscription)
    }

    /// Lists the subscriptions that the caller may manage, oldest first.
    pub async fn list(&self, caller: &Credential) -> EngineResult<Vec<Subscription>> {
        let owner = match caller {
            Credential::Agent(agent) if !agent.rights.has(Right::ReadAllEvents) => Some(agent.agent_id),
            Credential::Agent(_) | Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => None,
        };
        Ok(self.core.store.subscriptions(caller.scope(), owner, MAX_PER_WORKSPACE).await?)
    }

    /// Finds a subscription.
    ///
    /// # Errors
    /// When the id is unknown, or it is not the caller's.
    pub async fn get(&self, caller: &Credential, id: SubscriptionId) -> EngineResult<Subscription> {
        let found = self.core.store.subscription(caller.scope(), id).await?;
        let found = found.ok_or(EngineError::NotFound(Missing::Subscription))?;
        self.core.authorize(caller, Operation::ManageSubscription { owner: found.created_by }).await?;
        Ok(found)
    }

    /// Decrypts the secrets of a subscription.
    pub(super) fn open_secrets(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        secret: &EncryptedSecret,
    ) -> EngineResult<SubscriptionSecrets> {
        let plain = self.secrets.open(&secret_context(scope, id), secret);
        plain
            .and_then(|plain| serde_json::from_slice(&plain).ok())
            .ok_or_else(|| EngineError::Internal(Fault::SealedWithUnknownKey { key_id: secret.key_id.clone() }))
    }

    /// Delivers the missed events since a time, and enables a disabled subscription. Delivered events are not repeated.
    ///
    /// # Errors
    /// When there is no such subscription, or it is not the caller's.
    pub async fn replay(
        &self,
        caller: &Credential,
        id: SubscriptionId,
        since: DateTime<Utc>,
    ) -> EngineResult<Subscription> {
        let scope = caller.scope();
        // Checks that the caller may manage it. The statements below look only at the id.
        self.get(caller, id).await?;
        if !self.core.store.replay_subscription(scope, id, since).await? {
            return Err(EngineError::NotFound(Missing::Subscription));
        }
        // Read again: the replay has changed its state.
        self.get(caller, id).await
    }

    /// Deletes a subscription; its pending events are dropped.
    ///
    /// # Errors
    /// When there is no such subscription, or it is not the caller's.
    pub async fn delete(&self, caller: &Credential, id: SubscriptionId) -> EngineResult<()> {
        self.get(caller, id).await?;
        let deleted = self.core.store.delete_subscription(caller.scope(), id).await?;
        if deleted { Ok(()) } else { Err(EngineError::NotFound(Missing::Subscription)) }
    }

    /// Lists the deliveries of a subscription, newest first.
    ///
    /// # Errors
    /// When there is no such subscription, it is not the caller's, or there is no such status.
    pub async fn deliveries(
        &self,
        caller: &Credential,
        id: SubscriptionId,
        status: Option<&str>,
        limit: i64,
    ) -> EngineResult<Vec<SubscriptionDelivery>> {
        let parse = |name| {
            DeliveryStatus::parse(name).ok_or_else(|| invalid("status must be one of pending, delivered, dead_letter"))
        };
        let status = status.map(parse).transpose()?;
        self.get(caller, id).await?;
        Ok(self.core.store.subscription_deliveries(caller.scope(), id, status, limit).await?)
    }

    /// Delivers an event again.
    ///
    /// # Errors
    /// When there is no such subscription or delivery, or it is not the caller's.
    pub async fn replay_delivery(
        &self,
        caller: &Credential,
        id: SubscriptionId,
        delivery: SubscriptionDeliveryId,
    ) -> EngineResult<SubscriptionDelivery> {
        self.get(caller, id).await?;
        let scope = caller.scope();
        let replayed = self.core.store.replay_subscription_delivery(scope, id, delivery, self.core.now()).await?;
        replayed.ok_or(EngineError::NotFound(Missing::Delivery))
    }
}

/// Encryption context of a subscription's secrets.
pub(crate) fn secret_context(scope: WorkspaceScope, id: SubscriptionId) -> String {
    format!("subscription {}/{}", scope.workspace_id(), id.get())
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::invalid_request(message.into())
}

fn check_events(mut events: Vec<String>) -> EngineResult<Vec<String>> {
    if events.is_empty() || events.len() > MAX_EVENTS {
        return Err(invalid(format!("events must name 1 to {MAX_EVENTS} kinds of events")));
    }
    if let Some(unknown) = events.iter().find(|kind| !is_subscribable(kind)) {
        return Err(invalid(format!("\"{unknown}\" is no kind of event that can be subscribed to")));
    }
    let mut known = std::collections::HashSet::new();
    events.retain(|kind| known.insert(kind.clone()));
    Ok(events)
}

fn build_filter(channel: Option<&str>, mentions: Option<&str>) -> EngineResult<Option<EventFilter>> {
    let check = |field: &str, name: &str| {
        if name.is_empty() || name.len() > MAX_AGENT_NAME_BYTES {
            return Err(invalid(format!("filter.{field} must have 1 to {MAX_AGENT_NAME_BYTES} bytes")));
        }
        Ok(name.to_owned())
    };
    let mention = |name| check("mentions", str::strip_prefix(name, '@').unwrap_or(name));
    let filter = EventFilter {
        channel: channel.map(|name| check("channel", strip_hash(name))).transpose()?,
        mentions: mentions.map(mention).transpose()?,
    };
    // An empty filter is stored as none, so that it is not evaluated for each event.
    Ok((filter != EventFilter::default()).then_some(filter))
}

fn check_headers(headers: &BTreeMap<String, String>) -> EngineResult<()> {
    if headers.len() > MAX_HEADERS {
        return Err(invalid(format!("headers must not be more than {MAX_HEADERS}")));
    }
    // HTTP compares names without case: one of two spellings would silently replace the other.
    let mut names: Vec<String> = headers.keys().map(|name| name.to_ascii_lowercase()).collect();
    names.sort_unstable();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(invalid("headers must not name one twice"));
    }
    for (name, value) in headers {
        if let Some(problem) = header_problem(name, value) {
            return Err(invalid(format!("header \"{}\" {problem}", name.escape_default())));
        }
    }
    Ok(())
}

fn check_secret(secret: Option<&str>, scheme: Option<&str>) -> EngineResult<Option<SignatureScheme>> {
    let scheme = match scheme {
        None => None,
        Some(word) => Some(
            SignatureScheme::parse(word)
                .ok_or_else(|| invalid("signature_scheme must be relay or standard-webhooks"))?,
        ),
    };
    let Some(secret) = secret else {
        return match scheme {
            Some(SignatureScheme::StandardWebhooks) => Err(invalid("standard-webhooks needs a secret")),
            Some(SignatureScheme::Relay) | None => Ok(None),
        };
    };
    if secret.is_empty() || secret.len() > MAX_SECRET_BYTES {
        return Err(invalid(format!("secret must have 1 to {MAX_SECRET_BYTES} bytes")));
    }
    let scheme = scheme.unwrap_or(SignatureScheme::Relay);
    if scheme == SignatureScheme::StandardWebhooks && standard_webhooks_key(secret).is_none() {
        return Err(invalid("secret must be whsec_ and base64 of 24 to 64 bytes"));
    }
    Ok(Some(scheme))
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD};

    use super::*;

    #[test]
    fn secrets_must_fit_their_scheme() {
        let standard = |bytes: usize| format!("whsec_{}", STANDARD.encode(vec![1; bytes]));
        for (secret, scheme, expected) in [
            (None, None, Ok(None)),
            (None, Some("relay"), Ok(None)),
            (Some("s"), None, Ok(Some(SignatureScheme::Relay))),
            (Some(&*standard(24)), Some("standard-webhooks"), Ok(Some(SignatureScheme::StandardWebhooks))),
            (Some(&*standard(64)), Some("standard-webhooks"), Ok(Some(SignatureScheme::StandardWebhooks))),
            (Some(&*standard(23)), Some("standard-webhooks"), Err(())),
            (Some(&*standard(65)), Some("standard-webhooks"), Err(())),
            (Some("whsec_%%%"), Some("standard-webhooks"), Err(())),
            (Some("plain"), Some("standard-webhooks"), Err(())),
            (None, Some("standard-webhooks"), Err(())),
            (Some("s"), Some("md5"), Err(())),
            (Some(""), None, Err(())),
        ] {
            assert_eq!(check_secret(secret, scheme).map_err(|_| ()), expected, "{secret:?} {scheme:?}");
        }
    }

    #[test]
    fn filters_and_events_are_normalized_and_checked() {
        assert_eq!(
            build_filter(Some("#dev"), Some("@bob")).unwrap(),
            Some(EventFilter { channel: Some("dev".to_owned()), mentions: Some("bob".to_owned()) })
        );
        assert_eq!(build_filter(None, None).unwrap(), None);
        assert!(build_filter(Some(""), None).is_err());
        let events = |kinds: &[&str]| check_events(kinds.iter().map(ToString::to_string).collect());
        assert_eq!(events(&["message.created", "*", "message.created"]).unwrap(), ["message.created", "*"]);
        assert!(events(&[]).is_err());
        assert!(events(&["nonsense"]).is_err());
        let twice = BTreeMap::from([("X-A".to_owned(), String::new()), ("x-a".to_owned(), String::new())]);
        assert!(check_headers(&twice).is_err());
    }
}
