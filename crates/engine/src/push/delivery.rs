//! Call settings of http_push nodes: checked input of clients, and their encrypted secrets
//! (docs/protocol/node.md, "Push settings").

use std::collections::BTreeMap;

use relay_domain::{
    NodeId, WorkspaceScope,
    push::{
        AckMode, MAX_RETRY_DELAY, MAX_SCHEDULE_ENTRIES, PushOrdering, STANDARD_SCHEDULE, header_problem,
        settings::{EndpointAuth, EndpointSecrets, EndpointSettings, RetrySchedule, SignedPayload},
    },
    subscriptions::{MAX_HEADER_VALUE_BYTES, MAX_HEADERS, MAX_SECRET_BYTES, secrets::standard_webhooks_key},
};
use relay_egress::{Policy, Refusal};
use relay_store::{NewDelivery, subscriptions::definitions::EncryptedSecret};
use relay_wire::field::ToValue as _;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    EngineError, EngineResult,
    access::secrets::Secrets,
    error::{Fault, InvalidInput},
};

/// Shown in place of a secret. A write of this text keeps the stored secret.
const REDACTED: &str = "[redacted]";
/// Name of the Standard Webhooks scheme and schedule.
const STANDARD_WEBHOOKS: &str = "standard-webhooks";

#[derive(Deserialize)]
struct DeliveryInput {
    url: Option<String>,
    // Clients send both spellings of these two fields (docs/protocol/node.md).
    #[serde(alias = "ackMode")]
    ack_mode: Option<String>,
    auth: Option<AuthInput>,
    #[serde(alias = "useProxy")]
    use_proxy: Option<bool>,
    ordering: Option<String>,
    retry: Option<RetryInput>,
}

#[derive(Deserialize)]
struct AuthInput {
    #[serde(rename = "type")]
    kind: String,
    token: Option<String>,
    headers: Option<BTreeMap<String, String>>,
    secret: Option<String>,
    signature_header: Option<String>,
    timestamp_header: Option<String>,
    signed_payload: Option<String>,
    encoding: Option<String>,
    prefix: Option<String>,
    signature_scheme: Option<String>,
}

#[derive(Deserialize)]
struct RetryInput {
    schedule: Option<ScheduleInput>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ScheduleInput {
    Named(String),
    Seconds(Vec<u32>),
}

/// Stored settings of a node that a request changes.
#[derive(Debug, Default)]
pub(crate) struct FormerSettings<'a> {
    /// Base of fields that the request leaves out; `None` for their defaults.
    pub(crate) base: Option<&'a Value>,
    /// Values of secrets that the request leaves redacted.
    pub(crate) secrets: EndpointSecrets,
}

impl Secrets {
    /// Checks a client's input and encrypts its secrets.
    pub(crate) fn seal_node_delivery(
        &self,
        policy: &Policy,
        scope: WorkspaceScope,
        node: &NodeId,
        given: Value,
        former: FormerSettings<'_>,
    ) -> EngineResult<(EndpointSettings, NewDelivery)> {
        // Stored settings that do not decode count as none: the client must send all of them, which repairs the row.
        let base = former.base.and_then(|stored| serde_json::from_value::<EndpointSettings>(stored.clone()).ok());
        let given: DeliveryInput = serde_json::from_value(given).map_err(|error| invalid(error.to_string()))?;
        let url = given.url.or_else(|| base.as_ref().map(|b| b.url.clone()));
        let url = url.ok_or_else(|| invalid("delivery.url is required"))?;
        check_url(policy, &url)?;
        let ack_mode = match given.ack_mode {
            Some(name) => {
                AckMode::parse(&name).ok_or_else(|| invalid("ack_mode must be manual, on_2xx or response"))?
            }
            None => base.as_ref().map_or_else(AckMode::default, |b| b.ack_mode),
        };
        let ordering = match given.ordering {
            Some(name) => PushOrdering::parse(&name).ok_or_else(|| invalid("ordering must be seq or none"))?,
            None => base.as_ref().map_or_else(PushOrdering::default, |b| b.ordering),
        };
        let (auth, secrets) = match (given.auth, &base) {
            (Some(auth), _) => read_auth(auth, &former.secrets)?,
            (None, Some(base)) => (base.auth.clone(), former.secrets),
            (None, None) => (EndpointAuth::None, EndpointSecrets::default()),
        };
        let retry = match given.retry {
            None => base.as_ref().and_then(|b| b.retry.clone()),
            Some(retry) => retry.schedule.map(read_schedule).transpose()?,
        };
        let use_proxy = given.use_proxy.or(base.as_ref().map(|b| b.use_proxy)).unwrap_or(false);
        let delivery = EndpointSettings { url, ack_mode, auth, use_proxy, ordering, retry };
        // Nothing is encrypted for an endpoint without secrets, so the loss of a key does not concern it.
        let sealed = if secrets == EndpointSecrets::default() {
            None
        } else {
            // Strings always encode.
            let plain = serde_json::to_vec(&secrets).unwrap_or_default();
            Some(self.seal(&secret_context(scope, node), &plain)?)
        };
        let shown = delivery.to_value();
        Ok((delivery, NewDelivery { node_id: node.clone(), public: shown, sealed }))
    }

    /// Decrypts the secrets of a node.
    pub(crate) fn open_node_delivery(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        sealed: Option<&EncryptedSecret>,
    ) -> EngineResult<EndpointSecrets> {
        let Some(sealed) = sealed else { return Ok(EndpointSecrets::default()) };
        let plain = self.open(&secret_context(scope, node), sealed);
        plain
            .and_then(|plain| serde_json::from_slice(&plain).ok())
            // An error instead of no secrets: a call must not leave unsigned.
            .ok_or_else(|| EngineError::Internal(Fault::SealedWithUnknownKey { key_id: sealed.key_id.clone() }))
    }
}

/// Encryption context of a node's secrets.
pub(crate) fn secret_context(scope: WorkspaceScope, node: &NodeId) -> String {
    format!("node {}/{node}", scope.workspace_id())
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::Invalid(InvalidInput::NodeDelivery(message.into()))
}

fn check_url(policy: &Policy, url: &str) -> EngineResult<()> {
    match policy.check_url(url) {
        Ok(_) => Ok(()),
        Err(refusal @ Refusal::NotAUrl) => Err(invalid(format!("delivery.url: {refusal}"))),
        Err(refusal) => Err(EngineError::Invalid(InvalidInput::UnsafeDeliveryUrl(refusal.to_string()))),
    }
}

fn read_schedule(given: ScheduleInput) -> EngineResult<RetrySchedule> {
    let schedule = match given {
        ScheduleInput::Named(name) if name == STANDARD_WEBHOOKS => STANDARD_SCHEDULE.to_vec(),
        ScheduleInput::Named(_) => {
            return Err(invalid("retry.schedule must be standard-webhooks or a list of seconds"));
        }
        ScheduleInput::Seconds(seconds) => seconds,
    };
    let fits = (1..=MAX_SCHEDULE_ENTRIES).contains(&schedule.len())
        && schedule.iter().all(|pause| (1..=MAX_RETRY_DELAY.as_secs()).contains(&u64::from(*pause)));
    if !fits {
        return Err(invalid(format!(
            "retry.schedule must have 1 to {MAX_SCHEDULE_ENTRIES} pauses of 1 to {} seconds",
            MAX_RETRY_DELAY.as_secs()
        )));
    }
    Ok(RetrySchedule { schedule })
}

fn read_auth(given: AuthInput, known: &EndpointSecrets) -> EngineResult<(EndpointAuth, EndpointSecrets)> {
    let redacted = || REDACTED.to_owned();
    match given.kind.as_str() {
        "none" => Ok((EndpointAuth::None, EndpointSecrets::default())),
        "bearer" => {
            let token = resolve_secret("token", given.token, known.token.as_ref())?;
            // It becomes part of a header, which other bytes would break.
            if token.len() > MAX_HEADER_VALUE_BYTES || token.bytes().any(|byte| !byte.is_ascii_graphic()) {
                return Err(invalid("auth.token must be visible ASCII of at most 4096 bytes"));
            }
            let secrets = EndpointSecrets { token: Some(token), ..EndpointSecrets::default() };
            Ok((EndpointAuth::Bearer { token: redacted() }, secrets))
        }
        "static_headers" => {
            let given = given.headers.unwrap_or_default();
            if given.is_empty() || given.len() > MAX_HEADERS {
                return Err(invalid(format!("auth.headers must be 1 to {MAX_HEADERS}")));
            }
            let (mut headers, mut lower) = (BTreeMap::new(), std::collections::BTreeSet::new());
            for (name, value) in given {
                let value = resolve_secret(&format!("headers.{name}"), Some(value), known.headers.get(&name))?;
                if let Some(problem) = header_problem(&name, &value) {
                    return Err(invalid(format!("header \"{}\" {problem}", name.escape_default())));
                }
                // HTTP compares names without case: one of the two would silently replace the other.
                if !lower.insert(name.to_ascii_lowercase()) {
                    return Err(invalid("auth.headers must not name one twice"));
                }
                headers.insert(name, value);
            }
            let shown = headers.keys().map(|name| (name.clone(), redacted())).collect();
            Ok((
                EndpointAuth::StaticHeaders { headers: shown },
                EndpointSecrets { headers, ..EndpointSecrets::default() },
            ))
        }
        "hmac_sha256" => read_hmac(given, known),
        _ => Err(invalid("auth.type must be none, bearer, static_headers or hmac_sha256")),
    }
}

fn read_hmac(given: AuthInput, known: &EndpointSecrets) -> EngineResult<(EndpointAuth, EndpointSecrets)> {
    let secret = resolve_secret("secret", given.secret, known.secret.as_ref())?;
    if secret.len() > MAX_SECRET_BYTES {
        return Err(invalid(format!("auth.secret must have at most {MAX_SECRET_BYTES} bytes")));
    }
    match given.signature_scheme.as_deref() {
        None => {}
        Some(STANDARD_WEBHOOKS) if standard_webhooks_key(&secret).is_none() => {
            return Err(invalid("auth.secret must be whsec_ and base64 of 24 to 64 bytes"));
        }
        Some(STANDARD_WEBHOOKS) => {}
        Some(_) => return Err(invalid("auth.signature_scheme must be standard-webhooks, or left out")),
    }
    let header = |field: &str, name: Option<String>, default: &str| {
        let name = name.unwrap_or_else(|| default.to_owned());
        // Only the name is checked: the value is computed for each call.
        match header_problem(&name, "") {
            Some(problem) => Err(invalid(format!("auth.{field} {problem}"))),
            None => Ok(name),
        }
    };
    let signed_payload = match given.signed_payload.as_deref() {
        None | Some("timestamp.body") => SignedPayload::TimestampAndBody,
        Some("body") => SignedPayload::Body,
        Some(_) => return Err(invalid("auth.signed_payload must be timestamp.body or body")),
    };
    let encoding = given.encoding.unwrap_or_else(|| "hex".to_owned());
    if encoding != "hex" {
        return Err(invalid("auth.encoding must be hex"));
    }
    let prefix = given.prefix.unwrap_or_else(|| "sha256=".to_owned());
    if prefix.len() > 64 || prefix.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return Err(invalid("auth.prefix must be visible ASCII of at most 64 bytes"));
    }
    let auth = EndpointAuth::HmacSha256 {
        secret: REDACTED.to_owned(),
        signature_header: header("signature_header", given.signature_header, "X-Relaycast-Signature")?,
        timestamp_header: header("timestamp_header", given.timestamp_header, "X-Relaycast-Timestamp")?,
        signed_payload,
        encoding,
        prefix,
        signature_scheme: given.signature_scheme,
    };
    Ok((auth, EndpointSecrets { secret: Some(secret), ..EndpointSecrets::default() }))
}

/// Returns a secret as written, or the stored one where the client wrote `[redacted]`.
fn resolve_secret(field: &str, given: Option<String>, stored: Option<&String>) -> EngineResult<String> {
    match given {
        Some(text) if text == REDACTED => {
            stored.cloned().ok_or_else(|| invalid(format!("auth.{field}: there is no stored value to keep")))
        }
        Some(text) if !text.is_empty() => Ok(text),
        _ => Err(invalid(format!("auth.{field} is required"))),
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{WorkspaceId, push::RetryPolicy};

    use serde_json::json;

    use super::*;

    fn read(given: Value, stored: Option<(&Value, EndpointSecrets)>) -> EngineResult<(EndpointSettings, NewDelivery)> {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let (base, known) = stored.unzip();
        let former = FormerSettings { base, secrets: known.unwrap_or_default() };
        Secrets::for_test("a").seal_node_delivery(&Policy::default(), scope, &NodeId::new("n"), given, former)
    }

    const URL: &str = "https://example.org/hook";

    #[test]
    fn settings_without_their_secret_are_unusable() {
        let auth = json!({ "type": "hmac_sha256", "secret": "s" });
        let plain = read(json!({ "url": URL, "auth": auth }), None).unwrap().0.auth;
        let of = |secret: &str| EndpointSecrets { secret: Some(secret.to_owned()), ..EndpointSecrets::default() };
        assert!(of("s").suffice_for(&plain));
        assert!(!of("").suffice_for(&plain) && !EndpointSecrets::default().suffice_for(&plain));
        let mut standard = plain;
        if let EndpointAuth::HmacSha256 { signature_scheme, .. } = &mut standard {
            *signature_scheme = Some(STANDARD_WEBHOOKS.to_owned());
        }
        assert!(!of("whsec_c2hvcnQ=").suffice_for(&standard) && !of("s").suffice_for(&standard));
    }

    #[test]
    fn missing_settings_get_their_defaults() {
        let (delivery, new) = read(json!({ "url": URL }), None).unwrap();
        assert_eq!(
            new.public,
            json!({ "url": URL, "ack_mode": "manual", "auth": { "type": "none" }, "use_proxy": false, "ordering": "seq" })
        );
        assert_eq!((delivery.retry_policy(), delivery.adapter()), (RetryPolicy::UntilExpiry, "http.basic.v1"));
        assert!(new.sealed.is_none());
        let auth = json!({ "type": "hmac_sha256", "secret": "s" });
        let (delivery, new) = read(json!({ "url": URL, "ackMode": "on_2xx", "auth": auth }), None).unwrap();
        assert_eq!((delivery.adapter(), delivery.ack_mode), ("http.hmac.v1", AckMode::On2xx));
        assert_eq!(
            new.public["auth"],
            json!({ "type": "hmac_sha256", "secret": "[redacted]", "signature_header": "X-Relaycast-Signature",
                    "timestamp_header": "X-Relaycast-Timestamp", "signed_payload": "timestamp.body", "encoding": "hex",
                    "prefix": "sha256=" })
        );
    }

    #[test]
    fn redacted_secrets_keep_their_stored_values() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let node = NodeId::new("n");
        let auth = json!({ "type": "static_headers", "headers": { "X-Key": "top-secret", "X-B": "b" } });
        let (_, new) = read(json!({ "url": URL, "auth": auth }), None).unwrap();
        assert!(!new.public.to_string().contains("top-secret"));
        let secrets = Secrets::for_test("a");
        let opened = secrets.open_node_delivery(scope, &node, new.sealed.as_ref()).unwrap();
        assert_eq!(opened.headers["X-Key"], "top-secret");
        let echo = json!({ "url": URL, "auth": { "type": "static_headers", "headers": { "X-Key": "[redacted]" } } });
        let (_, again) = read(echo.clone(), Some((&new.public, opened))).unwrap();
        let opened = secrets.open_node_delivery(scope, &node, again.sealed.as_ref()).unwrap();
        assert_eq!(opened.headers, BTreeMap::from([("X-Key".to_owned(), "top-secret".to_owned())]));
        assert!(read(echo, None).is_err(), "nothing is stored");
        let (kept, _) = read(json!({ "ordering": "none" }), Some((&again.public, opened))).unwrap();
        assert_eq!((kept.url.as_str(), kept.ordering), (URL, PushOrdering::None));
        assert!(matches!(kept.auth, EndpointAuth::StaticHeaders { .. }));
    }

    #[test]
    fn invalid_settings_are_refused() {
        for given in [
            json!({}),
            json!({ "url": 7 }),
            json!({ "url": "nonsense" }),
            json!({ "url": URL, "ack_mode": "never" }),
            json!({ "url": URL, "ordering": "random" }),
            json!({ "url": URL, "retry": { "schedule": [] } }),
            json!({ "url": URL, "retry": { "schedule": [0] } }),
            json!({ "url": URL, "retry": { "schedule": "soon" } }),
            json!({ "url": URL, "retry": { "schedule": vec![1; 33] } }),
            json!({ "url": URL, "auth": { "type": "basic" } }),
            json!({ "url": URL, "auth": { "type": "bearer" } }),
            json!({ "url": URL, "auth": { "type": "bearer", "token": "a b" } }),
            json!({ "url": URL, "auth": { "type": "static_headers", "headers": {} } }),
            json!({ "url": URL, "auth": { "type": "static_headers", "headers": { "webhook-id": "x" } } }),
            json!({ "url": URL, "auth": { "type": "static_headers", "headers": { "X-A": "a\nb" } } }),
            json!({ "url": URL, "auth": { "type": "hmac_sha256", "secret": "" } }),
            json!({ "url": URL, "auth": { "type": "hmac_sha256", "secret": "s", "encoding": "base64" } }),
            json!({ "url": URL, "auth": { "type": "hmac_sha256", "secret": "s", "signature_scheme": "standard-webhooks" } }),
            json!({ "url": URL, "auth": { "type": "hmac_sha256", "secret": "s", "signature_header": "Host" } }),
        ] {
            assert!(
                matches!(read(given.clone(), None), Err(EngineError::Invalid(InvalidInput::NodeDelivery(_)))),
                "{given}"
            );
        }
        for url in ["http://example.org", "https://127.0.0.1/", "https://localhost/", "https://a:b@example.org/"] {
            let refused = read(json!({ "url": url }), None);
            assert!(matches!(refused, Err(EngineError::Invalid(InvalidInput::UnsafeDeliveryUrl(_)))), "{url}");
        }
    }
}
