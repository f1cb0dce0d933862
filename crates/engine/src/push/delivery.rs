//! How a node of kind http_push is called: what clients give, what is shown of it, what is kept sealed
//! (contract: node.md 13.1).

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use relay_domain::{
    NodeId, WorkspaceScope,
    push::{AckMode, HTTP_ADAPTERS, MAX_PAUSE, MAX_SCHEDULE, Ordering, RetryPolicy, STANDARD_SCHEDULE, header_problem},
    subscription::{MAX_HEADER_VALUE_BYTES, MAX_HEADERS, MAX_SECRET_BYTES},
};
use relay_egress::{Policy, Refusal};
use relay_store::{NewDelivery, subscriptions::Sealed};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{EngineError, EngineResult, secrets::Secrets};

/// What is shown in the place of a secret. A write that says so keeps the stored one.
const REDACTED: &str = "[redacted]";
/// The name of the Standard Webhooks' scheme and schedule.
const STANDARD_WEBHOOKS: &str = "standard-webhooks";
/// What a secret of that scheme begins with, and how many bytes it stands for.
const STANDARD_PREFIX: &str = "whsec_";
const STANDARD_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// What is kept sealed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeliverySecrets {
    #[serde(default)]
    pub(crate) token: Option<String>,
    #[serde(default)]
    pub(crate) secret: Option<String>,
    #[serde(default)]
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Given {
    url: Option<String>,
    #[serde(alias = "ackMode")]
    ack_mode: Option<String>,
    auth: Option<GivenAuth>,
    #[serde(alias = "useProxy")]
    use_proxy: Option<bool>,
    ordering: Option<String>,
    retry: Option<GivenRetry>,
}

#[derive(Deserialize)]
struct GivenAuth {
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
struct GivenRetry {
    schedule: Option<GivenSchedule>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum GivenSchedule {
    Named(String),
    Seconds(Vec<u32>),
}

/// What is shown, and what pushing goes by.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct NodeDelivery {
    pub(crate) url: String,
    pub(crate) ack_mode: String,
    pub(crate) auth: NodeAuth,
    pub(crate) use_proxy: bool,
    pub(crate) ordering: String,
    /// `{schedule: [seconds]}`; none for the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retry: Option<NodeRetry>,
}

/// How calls are authenticated, without what is secret of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum NodeAuth {
    None,
    Bearer {
        token: String,
    },
    StaticHeaders {
        headers: BTreeMap<String, String>,
    },
    HmacSha256 {
        secret: String,
        signature_header: String,
        timestamp_header: String,
        signed_payload: String,
        encoding: String,
        prefix: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        signature_scheme: Option<String>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRetry {
    /// Pauses in seconds.
    pub(crate) schedule: Vec<u32>,
}

impl NodeDelivery {
    pub(crate) fn ack_mode(&self) -> AckMode {
        AckMode::parse(&self.ack_mode).unwrap_or_default()
    }

    pub(crate) fn ordering(&self) -> Ordering {
        Ordering::parse(&self.ordering).unwrap_or_default()
    }

    pub(crate) fn retry(&self) -> RetryPolicy {
        self.retry.as_ref().map_or(RetryPolicy::UntilExpiry, |retry| {
            RetryPolicy::Schedule(retry.schedule.iter().map(|s| Duration::from_secs((*s).into())).collect())
        })
    }

    /// The adapter that goes with how calls are authenticated.
    pub(crate) const fn adapter(&self) -> &'static str {
        match self.auth {
            NodeAuth::None => HTTP_ADAPTERS[0],
            NodeAuth::Bearer { .. } => HTTP_ADAPTERS[1],
            NodeAuth::StaticHeaders { .. } => HTTP_ADAPTERS[2],
            NodeAuth::HmacSha256 { .. } => HTTP_ADAPTERS[3],
        }
    }
}

impl Secrets {
    /// Checks what a client gave and seals its secrets. What is left out of `given` is as in `base`, or as the
    /// contract says; what is given back as `[redacted]` is as in `known`.
    pub(crate) fn node_delivery(
        &self,
        policy: &Policy,
        scope: WorkspaceScope,
        node: &NodeId,
        given: Value,
        base: Option<&Value>,
        known: DeliverySecrets,
    ) -> EngineResult<(NodeDelivery, NewDelivery)> {
        let base = base.and_then(|shown| serde_json::from_value::<NodeDelivery>(shown.clone()).ok());
        let given: Given = serde_json::from_value(given).map_err(|error| invalid(error.to_string()))?;
        let url = given.url.or_else(|| base.as_ref().map(|b| b.url.clone()));
        let url = url.ok_or_else(|| invalid("delivery.url is required"))?;
        check_url(policy, &url)?;
        let word = |given: Option<String>, stored: Option<&String>, default: &str| {
            given.unwrap_or_else(|| stored.map_or_else(|| default.to_owned(), Clone::clone))
        };
        let ack_mode = word(given.ack_mode, base.as_ref().map(|b| &b.ack_mode), AckMode::default().as_str());
        AckMode::parse(&ack_mode).ok_or_else(|| invalid("ack_mode must be manual, on_2xx or response"))?;
        let ordering = word(given.ordering, base.as_ref().map(|b| &b.ordering), Ordering::default().as_str());
        Ordering::parse(&ordering).ok_or_else(|| invalid("ordering must be seq or none"))?;
        let (auth, secrets) = match (given.auth, &base) {
            (Some(auth), _) => read_auth(auth, &known)?,
            (None, Some(base)) => (base.auth.clone(), known),
            (None, None) => (NodeAuth::None, DeliverySecrets::default()),
        };
        let retry = match given.retry {
            None => base.as_ref().and_then(|b| b.retry.clone()),
            Some(retry) => retry.schedule.map(read_schedule).transpose()?,
        };
        let use_proxy = given.use_proxy.or(base.as_ref().map(|b| b.use_proxy)).unwrap_or(false);
        let delivery = NodeDelivery { url, ack_mode, auth, use_proxy, ordering, retry };
        let sealed = if secrets == DeliverySecrets::default() {
            None
        } else {
            // Strings always encode.
            let plain = serde_json::to_vec(&secrets).unwrap_or_default();
            Some(self.seal(&place(scope, node), &plain)?)
        };
        let shown = serde_json::to_value(&delivery).unwrap_or_else(|_| json!({}));
        Ok((delivery, NewDelivery { shown, sealed }))
    }

    /// Opens what was sealed for a node.
    pub(crate) fn open_node_delivery(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        sealed: Option<&Sealed>,
    ) -> EngineResult<DeliverySecrets> {
        let Some(sealed) = sealed else { return Ok(DeliverySecrets::default()) };
        let plain = self.open(&place(scope, node), sealed);
        plain
            .and_then(|plain| serde_json::from_slice(&plain).ok())
            .ok_or_else(|| EngineError::SealedWithUnknownKey { key_id: sealed.key_id.clone() })
    }
}

/// What sealed secrets count for.
pub(crate) fn place(scope: WorkspaceScope, node: &NodeId) -> String {
    format!("node {}/{node}", scope.workspace_id())
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::InvalidNodeDelivery(message.into())
}

fn check_url(policy: &Policy, url: &str) -> EngineResult<()> {
    match policy.check_url(url) {
        Ok(_) => Ok(()),
        Err(refusal @ Refusal::NotAUrl) => Err(invalid(format!("delivery.url: {refusal}"))),
        Err(refusal) => Err(EngineError::UnsafeNodeDeliveryUrl(refusal.to_string())),
    }
}

fn read_schedule(given: GivenSchedule) -> EngineResult<NodeRetry> {
    let schedule = match given {
        GivenSchedule::Named(name) if name == STANDARD_WEBHOOKS => STANDARD_SCHEDULE.to_vec(),
        GivenSchedule::Named(_) => {
            return Err(invalid("retry.schedule must be standard-webhooks or a list of seconds"));
        }
        GivenSchedule::Seconds(seconds) => seconds,
    };
    let fits = (1..=MAX_SCHEDULE).contains(&schedule.len())
        && schedule.iter().all(|pause| (1..=MAX_PAUSE.as_secs()).contains(&u64::from(*pause)));
    if !fits {
        return Err(invalid(format!(
            "retry.schedule must have 1 to {MAX_SCHEDULE} pauses of 1 to {} seconds",
            MAX_PAUSE.as_secs()
        )));
    }
    Ok(NodeRetry { schedule })
}

fn read_auth(given: GivenAuth, known: &DeliverySecrets) -> EngineResult<(NodeAuth, DeliverySecrets)> {
    let redacted = || REDACTED.to_owned();
    match given.kind.as_str() {
        "none" => Ok((NodeAuth::None, DeliverySecrets::default())),
        "bearer" => {
            let token = kept("token", given.token, known.token.as_ref())?;
            if token.len() > MAX_HEADER_VALUE_BYTES || token.bytes().any(|byte| !byte.is_ascii_graphic()) {
                return Err(invalid("auth.token must be visible ASCII of at most 4096 bytes"));
            }
            let secrets = DeliverySecrets { token: Some(token), ..DeliverySecrets::default() };
            Ok((NodeAuth::Bearer { token: redacted() }, secrets))
        }
        "static_headers" => {
            let given = given.headers.unwrap_or_default();
            if given.is_empty() || given.len() > MAX_HEADERS {
                return Err(invalid(format!("auth.headers must be 1 to {MAX_HEADERS}")));
            }
            let (mut headers, mut lower) = (BTreeMap::new(), std::collections::BTreeSet::new());
            for (name, value) in given {
                let value = kept(&format!("headers.{name}"), Some(value), known.headers.get(&name))?;
                if let Some(problem) = header_problem(&name, &value) {
                    return Err(invalid(format!("header \"{}\" {problem}", name.escape_default())));
                }
                if !lower.insert(name.to_ascii_lowercase()) {
                    return Err(invalid("auth.headers must not name one twice"));
                }
                headers.insert(name, value);
            }
            let shown = headers.keys().map(|name| (name.clone(), redacted())).collect();
            Ok((NodeAuth::StaticHeaders { headers: shown }, DeliverySecrets { headers, ..DeliverySecrets::default() }))
        }
        "hmac_sha256" => read_hmac(given, known),
        _ => Err(invalid("auth.type must be none, bearer, static_headers or hmac_sha256")),
    }
}

fn read_hmac(given: GivenAuth, known: &DeliverySecrets) -> EngineResult<(NodeAuth, DeliverySecrets)> {
    let secret = kept("secret", given.secret, known.secret.as_ref())?;
    if secret.len() > MAX_SECRET_BYTES {
        return Err(invalid(format!("auth.secret must have at most {MAX_SECRET_BYTES} bytes")));
    }
    match given.signature_scheme.as_deref() {
        None => {}
        Some(STANDARD_WEBHOOKS) if standard_key(&secret).is_none() => {
            return Err(invalid("auth.secret must be whsec_ and base64 of 24 to 64 bytes"));
        }
        Some(STANDARD_WEBHOOKS) => {}
        Some(_) => return Err(invalid("auth.signature_scheme must be standard-webhooks, or left out")),
    }
    let header = |field: &str, name: Option<String>, default: &str| {
        let name = name.unwrap_or_else(|| default.to_owned());
        match header_problem(&name, "") {
            Some(problem) => Err(invalid(format!("auth.{field} {problem}"))),
            None => Ok(name),
        }
    };
    let signed_payload = given.signed_payload.unwrap_or_else(|| "timestamp.body".to_owned());
    if !["timestamp.body", "body"].contains(&&*signed_payload) {
        return Err(invalid("auth.signed_payload must be timestamp.body or body"));
    }
    let encoding = given.encoding.unwrap_or_else(|| "hex".to_owned());
    if encoding != "hex" {
        return Err(invalid("auth.encoding must be hex"));
    }
    let prefix = given.prefix.unwrap_or_else(|| "sha256=".to_owned());
    if prefix.len() > 64 || prefix.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return Err(invalid("auth.prefix must be visible ASCII of at most 64 bytes"));
    }
    let auth = NodeAuth::HmacSha256 {
        secret: REDACTED.to_owned(),
        signature_header: header("signature_header", given.signature_header, "X-Relaycast-Signature")?,
        timestamp_header: header("timestamp_header", given.timestamp_header, "X-Relaycast-Timestamp")?,
        signed_payload,
        encoding,
        prefix,
        signature_scheme: given.signature_scheme,
    };
    Ok((auth, DeliverySecrets { secret: Some(secret), ..DeliverySecrets::default() }))
}

/// The key that a secret of the Standard Webhooks stands for.
pub(crate) fn standard_key(secret: &str) -> Option<Vec<u8>> {
    let key = STANDARD.decode(secret.strip_prefix(STANDARD_PREFIX)?).ok()?;
    STANDARD_BYTES.contains(&key.len()).then_some(key)
}

/// A secret as given, or as stored where it was given back unread.
fn kept(field: &str, given: Option<String>, stored: Option<&String>) -> EngineResult<String> {
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
    use relay_domain::WorkspaceId;

    use super::*;

    fn read(given: Value, stored: Option<(&Value, DeliverySecrets)>) -> EngineResult<(NodeDelivery, NewDelivery)> {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let (base, known) = stored.unzip();
        let known = known.unwrap_or_default();
        Secrets::for_test("a").node_delivery(&Policy::default(), scope, &NodeId::new("n"), given, base, known)
    }

    const URL: &str = "https://example.org/hook";

    #[test]
    fn defaults_are_those_of_the_contract() {
        let (delivery, new) = read(json!({ "url": URL }), None).unwrap();
        assert_eq!(
            new.shown,
            json!({ "url": URL, "ack_mode": "manual", "auth": { "type": "none" }, "use_proxy": false, "ordering": "seq" })
        );
        assert_eq!((delivery.retry(), delivery.adapter()), (RetryPolicy::UntilExpiry, "http.basic.v1"));
        assert!(new.sealed.is_none());
        let auth = json!({ "type": "hmac_sha256", "secret": "s" });
        let (delivery, new) = read(json!({ "url": URL, "ackMode": "on_2xx", "auth": auth }), None).unwrap();
        assert_eq!((delivery.adapter(), delivery.ack_mode()), ("http.hmac.v1", AckMode::On2xx));
        assert_eq!(
            new.shown["auth"],
            json!({ "type": "hmac_sha256", "secret": "[redacted]", "signature_header": "X-Relaycast-Signature",
                    "timestamp_header": "X-Relaycast-Timestamp", "signed_payload": "timestamp.body", "encoding": "hex",
                    "prefix": "sha256=" })
        );
    }

    #[test]
    fn secrets_are_sealed_and_kept_when_given_back_unread() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let node = NodeId::new("n");
        let auth = json!({ "type": "static_headers", "headers": { "X-Key": "top-secret", "X-B": "b" } });
        let (_, new) = read(json!({ "url": URL, "auth": auth }), None).unwrap();
        assert!(!new.shown.to_string().contains("top-secret"));
        let secrets = Secrets::for_test("a");
        let opened = secrets.open_node_delivery(scope, &node, new.sealed.as_ref()).unwrap();
        assert_eq!(opened.headers["X-Key"], "top-secret");
        let echo = json!({ "url": URL, "auth": { "type": "static_headers", "headers": { "X-Key": "[redacted]" } } });
        let (_, again) = read(echo.clone(), Some((&new.shown, opened))).unwrap();
        let opened = secrets.open_node_delivery(scope, &node, again.sealed.as_ref()).unwrap();
        assert_eq!(opened.headers, BTreeMap::from([("X-Key".to_owned(), "top-secret".to_owned())]));
        assert!(read(echo, None).is_err(), "nothing is stored");
        let (kept, _) = read(json!({ "ordering": "none" }), Some((&again.shown, opened))).unwrap();
        assert_eq!((kept.url.as_str(), kept.ordering()), (URL, Ordering::None));
        assert!(matches!(kept.auth, NodeAuth::StaticHeaders { .. }));
    }

    #[test]
    fn what_cannot_work_is_refused() {
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
            assert!(matches!(read(given.clone(), None), Err(EngineError::InvalidNodeDelivery(_))), "{given}");
        }
        for url in ["http://example.org", "https://127.0.0.1/", "https://localhost/", "https://a:b@example.org/"] {
            let refused = read(json!({ "url": url }), None);
            assert!(matches!(refused, Err(EngineError::UnsafeNodeDeliveryUrl(_))), "{url}");
        }
    }
}
