//! Call settings of http_push nodes without their secrets, as stored and as shown to clients (docs/protocol/node.md,
//! "Push settings"). Main types: [`EndpointSettings`] and [`EndpointAuth`]. The engine checks and encrypts the input of
//! clients.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    push::{AckMode, HTTP_ADAPTERS, PushOrdering, RetryPolicy},
    subscriptions::secrets::standard_webhooks_key,
};

/// Call settings of one endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSettings {
    /// URL to call.
    pub url: String,
    /// Condition under which a delivery is acknowledged.
    pub ack_mode: AckMode,
    /// Authentication of calls.
    pub auth: EndpointAuth,
    /// `true` to call through the operator's proxy.
    pub use_proxy: bool,
    /// Ordering of each agent's deliveries.
    pub ordering: PushOrdering,
    /// `None` to retry until the delivery expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetrySchedule>,
}

/// Authentication of calls. A placeholder stands for each secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EndpointAuth {
    /// No authentication.
    None,
    /// `Authorization: Bearer` with a token.
    Bearer {
        /// Placeholder.
        token: String,
    },
    /// Headers with secret values.
    StaticHeaders {
        /// Header names with placeholders.
        headers: BTreeMap<String, String>,
    },
    /// Signature with HMAC-SHA-256.
    HmacSha256 {
        /// Placeholder.
        secret: String,
        /// Name of the header with the signature.
        signature_header: String,
        /// Name of the header with the time of signing.
        timestamp_header: String,
        /// Text that is signed.
        signed_payload: SignedPayload,
        /// Encoding of the signature; always `hex`.
        encoding: String,
        /// Text before the signature.
        prefix: String,
        /// `standard-webhooks` to sign as in Standard Webhooks instead.
        #[serde(skip_serializing_if = "Option::is_none")]
        signature_scheme: Option<String>,
    },
}

/// Secret part of the settings; stored encrypted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSecrets {
    /// Token of the bearer scheme.
    #[serde(default)]
    pub token: Option<String>,
    /// Secret that signs calls.
    #[serde(default)]
    pub secret: Option<String>,
    /// Values of static headers.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl EndpointSecrets {
    /// Returns whether calls can be authenticated as the settings demand.
    #[must_use]
    pub fn suffice_for(&self, auth: &EndpointAuth) -> bool {
        match auth {
            EndpointAuth::None => true,
            EndpointAuth::Bearer { .. } => self.token.is_some(),
            EndpointAuth::StaticHeaders { .. } => !self.headers.is_empty(),
            EndpointAuth::HmacSha256 { signature_scheme: Some(_), .. } => {
                self.secret.as_deref().and_then(standard_webhooks_key).is_some()
            }
            EndpointAuth::HmacSha256 { .. } => self.secret.as_deref().is_some_and(|secret| !secret.is_empty()),
        }
    }
}

/// Text that a signature covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SignedPayload {
    /// Time of signing, a dot, and the body.
    #[serde(rename = "timestamp.body")]
    TimestampAndBody,
    /// The body alone.
    #[serde(rename = "body")]
    Body,
}

/// Delays between the attempts of a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetrySchedule {
    /// Delays in seconds.
    pub schedule: Vec<u32>,
}

impl EndpointSettings {
    /// Returns the retry policy of failed deliveries.
    #[must_use]
    pub fn retry_policy(&self) -> RetryPolicy {
        self.retry.as_ref().map_or(RetryPolicy::UntilExpiry, |retry| {
            RetryPolicy::Schedule(retry.schedule.iter().map(|seconds| Duration::from_secs((*seconds).into())).collect())
        })
    }

    /// Returns the delivery adapter that follows from the authentication.
    #[must_use]
    pub const fn adapter(&self) -> &'static str {
        match self.auth {
            EndpointAuth::None => HTTP_ADAPTERS[0],
            EndpointAuth::Bearer { .. } => HTTP_ADAPTERS[1],
            EndpointAuth::StaticHeaders { .. } => HTTP_ADAPTERS[2],
            EndpointAuth::HmacSha256 { .. } => HTTP_ADAPTERS[3],
        }
    }
}
