//! Event subscriptions: who wants which events sent where. Sending them is the worker's work.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use relay_domain::{
    SubscriptionId, WorkspaceScope,
    names::{MAX_AGENT_NAME_BYTES, strip_hash},
    plan::Ceiling,
    subscription::{
        MAX_EVENTS, MAX_HEADERS, MAX_PER_WORKSPACE, MAX_SECRET_BYTES, SignatureScheme, header_problem, is_subscribable,
    },
};
use relay_store::subscriptions::{NewSubscription, Sealed};
pub use relay_store::subscriptions::{SubscriptionDeliveryRow, SubscriptionRow};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{Engine, EngineError, EngineResult};

/// Default and most of a list of deliveries.
pub const PAGE: (i64, i64) = (100, 200);
/// What a secret for the Standard Webhooks begins with, and how many bytes it stands for.
const STANDARD_PREFIX: &str = "whsec_";
const STANDARD_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// A request for a subscription.
#[derive(Debug)]
pub struct Subscribe {
    /// The kinds of events; `*` is all of them.
    pub events: Vec<String>,
    /// Only events of this channel.
    pub channel: Option<String>,
    /// Only events that mention this agent.
    pub mentions: Option<String>,
    /// Where they go.
    pub url: String,
    /// Headers that are sent along.
    pub headers: BTreeMap<String, String>,
    /// What calls are signed with.
    pub secret: Option<String>,
    /// How they are signed.
    pub signature_scheme: Option<String>,
}

/// What a subscription keeps secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscriptionSecrets {
    /// What calls are signed with.
    pub secret: Option<String>,
    /// Headers that are sent along.
    pub headers: BTreeMap<String, String>,
}

impl Engine {
    /// Makes a subscription.
    ///
    /// # Errors
    /// When a field is out of bounds or makes no sense, or there are too many.
    pub async fn subscribe(&self, scope: WorkspaceScope, request: Subscribe) -> EngineResult<SubscriptionRow> {
        let id = SubscriptionId::new(self.next_id());
        let scheme = check_secret(request.secret.as_deref(), request.signature_scheme.as_deref())?;
        let events = check_events(request.events)?;
        let filter = filter(request.channel.as_deref(), request.mentions.as_deref())?;
        let allowed = self.egress().policy().check_url(&request.url);
        allowed.map_err(|refusal| invalid(format!("url cannot be called: {refusal}")))?;
        check_headers(&request.headers)?;
        let row = SubscriptionRow {
            subscription_id: id.get(),
            events,
            filter,
            url: request.url,
            header_names: request.headers.keys().cloned().collect(),
            signature_scheme: scheme.map(|scheme| scheme.as_str().to_owned()),
            created_at: self.now(),
            disabled_reason: None,
            disabled_at: None,
        };
        let secrets = SubscriptionSecrets { secret: request.secret, headers: request.headers };
        let sealed = if secrets == SubscriptionSecrets::default() {
            None
        } else {
            // Strings always encode.
            let plain = serde_json::to_vec(&secrets).unwrap_or_default();
            Some(self.inner.secrets.seal(&place(scope, id), &plain)?)
        };
        let new = NewSubscription { row: &row, sealed: sealed.as_ref() };
        let ceiling = self.ceiling(scope, Ceiling::Subscriptions).await?.unwrap_or(MAX_PER_WORKSPACE);
        if !self.store().create_subscription(scope, &new, ceiling.min(MAX_PER_WORKSPACE)).await? {
            return Err(EngineError::PlanLimitExceeded(Ceiling::Subscriptions));
        }
        // Single deliveries make events only where somebody looks. It is there already: a worker asks for them, too.
        if row.events.iter().any(|kind| kind == "*" || kind.starts_with("delivery."))
            && let Err(error) = self.watch_events(&[scope]).await
        {
            tracing::debug!(error = &error as &dyn std::error::Error, "nobody asked for a new subscription's events");
        }
        Ok(row)
    }

    /// The subscriptions of a workspace, oldest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn subscriptions(&self, scope: WorkspaceScope) -> EngineResult<Vec<SubscriptionRow>> {
        Ok(self.store().subscriptions(scope, MAX_PER_WORKSPACE).await?)
    }

    /// A subscription.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn subscription(&self, scope: WorkspaceScope, id: SubscriptionId) -> EngineResult<SubscriptionRow> {
        self.store().subscription(scope, id).await?.ok_or(EngineError::SubscriptionNotFound)
    }

    /// What a subscription keeps secret, for whoever signs and sends its calls.
    pub(crate) fn opened_secrets(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        sealed: &Sealed,
    ) -> EngineResult<SubscriptionSecrets> {
        let plain = self.inner.secrets.open(&place(scope, id), sealed);
        plain
            .and_then(|plain| serde_json::from_slice(&plain).ok())
            .ok_or_else(|| EngineError::SealedWithUnknownKey { key_id: sealed.key_id.clone() })
    }

    /// Sends what a subscription has missed since then, and switches it on if it was switched off. What it has
    /// had it does not get again.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn replay_subscription(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        since: DateTime<Utc>,
    ) -> EngineResult<SubscriptionRow> {
        if !self.store().replay_subscription(scope, id, since).await? {
            return Err(EngineError::SubscriptionNotFound);
        }
        self.subscription(scope, id).await
    }

    /// Ends a subscription; what was on its way is dropped.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn unsubscribe(&self, scope: WorkspaceScope, id: SubscriptionId) -> EngineResult<()> {
        let gone = self.store().delete_subscription(scope, id).await?;
        if gone { Ok(()) } else { Err(EngineError::SubscriptionNotFound) }
    }

    /// Events on their way to a subscription's address, newest first.
    ///
    /// # Errors
    /// When there is no such subscription, or no such status.
    pub async fn subscription_deliveries(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        status: Option<&str>,
        limit: i64,
    ) -> EngineResult<Vec<SubscriptionDeliveryRow>> {
        if status.is_some_and(|status| !["pending", "delivered", "dead_letter"].contains(&status)) {
            return Err(invalid("status must be one of pending, delivered, dead_letter"));
        }
        self.subscription(scope, id).await?;
        Ok(self.store().subscription_deliveries(scope, id, status, limit).await?)
    }

    /// Sends an event once more.
    ///
    /// # Errors
    /// When there is no such subscription or delivery.
    pub async fn replay_subscription_delivery(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        delivery: i64,
    ) -> EngineResult<SubscriptionDeliveryRow> {
        self.subscription(scope, id).await?;
        let replayed = self.store().replay_subscription_delivery(scope, id, delivery, self.now()).await?;
        replayed.ok_or(EngineError::DeliveryNotFound)
    }
}

/// What sealed secrets count for.
pub(crate) fn place(scope: WorkspaceScope, id: SubscriptionId) -> String {
    format!("subscription {}/{}", scope.workspace_id(), id.get())
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::InvalidRequest(message.into())
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

fn filter(channel: Option<&str>, mentions: Option<&str>) -> EngineResult<Option<Value>> {
    let mut filter = Map::new();
    for (field, value) in [
        ("channel", channel.map(strip_hash)),
        ("mentions", mentions.map(|name| name.strip_prefix('@').unwrap_or(name))),
    ] {
        let Some(value) = value else { continue };
        if value.is_empty() || value.len() > MAX_AGENT_NAME_BYTES {
            return Err(invalid(format!("filter.{field} must have 1 to {MAX_AGENT_NAME_BYTES} bytes")));
        }
        filter.insert(field.to_owned(), json!(value));
    }
    Ok((!filter.is_empty()).then_some(Value::Object(filter)))
}

fn check_headers(headers: &BTreeMap<String, String>) -> EngineResult<()> {
    if headers.len() > MAX_HEADERS {
        return Err(invalid(format!("headers must not be more than {MAX_HEADERS}")));
    }
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
            _ => Ok(None),
        };
    };
    if secret.is_empty() || secret.len() > MAX_SECRET_BYTES {
        return Err(invalid(format!("secret must have 1 to {MAX_SECRET_BYTES} bytes")));
    }
    let scheme = scheme.unwrap_or(SignatureScheme::Relay);
    if scheme == SignatureScheme::StandardWebhooks {
        let bytes = secret.strip_prefix(STANDARD_PREFIX).and_then(|text| STANDARD.decode(text).ok());
        if bytes.is_none_or(|bytes| !STANDARD_BYTES.contains(&bytes.len())) {
            return Err(invalid("secret must be whsec_ and base64 of 24 to 64 bytes"));
        }
    }
    Ok(Some(scheme))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_fits_its_scheme() {
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
    fn filters_and_events_are_cleaned_and_checked() {
        assert_eq!(filter(Some("#dev"), Some("@bob")).unwrap(), Some(json!({ "channel": "dev", "mentions": "bob" })));
        assert_eq!(filter(None, None).unwrap(), None);
        assert!(filter(Some(""), None).is_err());
        let events = |kinds: &[&str]| check_events(kinds.iter().map(ToString::to_string).collect());
        assert_eq!(events(&["message.created", "*", "message.created"]).unwrap(), ["message.created", "*"]);
        assert!(events(&[]).is_err());
        assert!(events(&["nonsense"]).is_err());
        let twice = BTreeMap::from([("X-A".to_owned(), String::new()), ("x-a".to_owned(), String::new())]);
        assert!(check_headers(&twice).is_err());
    }
}
