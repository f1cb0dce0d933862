//! Typed identifiers, so that ids of different kinds cannot be confused.
//!
//! Snowflake ids are 63-bit integers in memory and decimal strings in JSON, never JSON numbers; what only the engine
//! reads is an exception ([`as_number`]).

pub mod as_number;

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// Error for a text that is not an id of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {kind} id")]
pub struct InvalidId {
    /// Expected kind of id.
    pub kind: &'static str,
}

/// Parses a number that is written without sign or leading zeros, so that one id has one text.
fn parse_canonical(text: &str) -> Option<i64> {
    let is_canonical = text == "0" || !text.starts_with(['0', '+', '-']);
    text.parse().ok().filter(|_| is_canonical)
}

/// Newtype over a snowflake. Its text form is the prefix, which may be empty, and the number.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(transparent))]
        pub struct $name(i64);

        impl $name {
            /// Wraps a raw 63-bit value from storage.
            #[must_use]
            pub const fn new(raw: i64) -> Self {
                Self(raw)
            }

            /// Returns the raw value for storage.
            #[must_use]
            pub const fn get(self) -> i64 {
                self.0
            }
        }

        impl as_number::NumericId for $name {
            fn from_number(number: i64) -> Self {
                Self(number)
            }

            fn to_number(self) -> i64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            /// Parses the prefix and a decimal number from 0 to 2^63-1 without sign or leading zeros.
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                text.strip_prefix($prefix).and_then(parse_canonical).map(Self).ok_or(InvalidId { kind: $kind })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                text.parse().map_err(D::Error::custom)
            }
        }
    };
}

id!(
    /// Id of a workspace, the tenant.
    WorkspaceId, "", "workspace"
);
id!(
    /// Id of an agent. A deleted agent's name may be reused, its id is not.
    AgentId, "", "agent"
);
id!(
    /// Id of a channel, or of the backing channel of a conversation.
    ChannelId, "", "channel"
);
id!(
    /// Id of a message. Ids sort by creation.
    MessageId, "", "message"
);
id!(
    /// Id of an attempt to hand a delivery over by http_push.
    AttemptId, "", "attempt"
);
id!(
    /// Id of an http_push worker, the owner of mailbox leases. A process gets a new one at each start.
    PushWorkerId, "", "push worker"
);
id!(
    /// Id of the delivery of one event to a subscription.
    SubscriptionDeliveryId, "", "subscription delivery"
);
id!(
    /// Id of a redrive of dead letters.
    RedriveId, "", "redrive"
);
id!(
    /// Id of a reaction.
    ReactionId, "", "reaction"
);
id!(
    /// Id of a file.
    FileId, "", "file"
);
id!(
    /// Id of one transaction of the committer. Fixed before the transaction, so that a batch whose commit outcome is
    /// unknown can be submitted again and recognised.
    BatchId, "", "batch"
);
id!(
    /// Id of one run of a gateway process, the owner of its leases. A restarted gateway has a new one.
    GatewayId, "", "gateway"
);

id!(
    /// Id of an inbound webhook.
    WebhookId, "wh_", "webhook"
);
id!(
    /// Id of an event subscription.
    SubscriptionId, "sub_", "subscription"
);
id!(
    /// Id of a session event.
    SessionEventId, "evt_", "session event"
);
id!(
    /// Id of an action definition.
    ActionId, "act_", "action"
);
id!(
    /// Id of an invocation, the same for all its attempts.
    InvocationId, "inv_", "invocation"
);
id!(
    /// Id of a trigger.
    TriggerId, "trg_", "trigger"
);
id!(
    /// Id of an observer token.
    ObserverTokenId, "ot_", "observer token"
);

id!(
    /// Id of the source of a delivery: a message, an invocation whose outcome is delivered, or a notice of the engine.
    SourceId, "", "delivery source"
);
id!(
    /// Id of a claim of deliveries by an agent on a poll node.
    ClaimId, "", "claim"
);
id!(
    /// Id of a stored object: the content of a file as one upload wrote it.
    FileObjectId, "", "file object"
);

impl SourceId {
    /// Returns the `message_id` that clients see, which names the source of whatever kind.
    #[must_use]
    pub const fn message_id(self) -> MessageId {
        MessageId(self.0)
    }
}

impl From<MessageId> for SourceId {
    fn from(id: MessageId) -> Self {
        Self(id.0)
    }
}

impl From<InvocationId> for SourceId {
    fn from(id: InvocationId) -> Self {
        Self(id.0)
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps a text.
            #[must_use]
            pub fn new(text: impl Into<String>) -> Self {
                Self(Arc::from(text.into()))
            }

            /// Returns the text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = std::convert::Infallible;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Ok(Self(text.into()))
            }
        }

        #[cfg(feature = "sqlx")]
        crate::columns::text_column!($name);
    };
}

text_id!(
    /// Id of a node: chosen by the broker (`node_<hex>`), or `node_direct_<agent id>` for a direct node.
    NodeId
);
text_id!(
    /// Name of a process that serves a node. A socket that names none is `default`.
    ProviderName
);
text_id!(
    /// Public id of a conversation: `dm_<24 hex>`, or a bare snowflake for a group.
    ConversationId
);

/// Start of the ids of implicit nodes, before the agent's id.
const DIRECT_PREFIX: &str = "node_direct_";

impl NodeId {
    /// Returns the id of the implicit node of an agent that connects directly.
    #[must_use]
    pub fn direct(agent: AgentId) -> Self {
        Self(format!("{DIRECT_PREFIX}{agent}").into())
    }

    /// Returns the agent whose implicit node this is.
    #[must_use]
    pub fn direct_agent(&self) -> Option<AgentId> {
        self.0.strip_prefix(DIRECT_PREFIX)?.parse().ok()
    }
}

impl ProviderName {
    /// Returns the provider name of a socket that names none.
    #[must_use]
    pub fn default_provider() -> Self {
        Self("default".into())
    }
}

/// Identity of one delivery: a source such as a message, its recipient, and the redrive number.
///
/// Its text form is `del_<source>_<agent>`, with `_r<n>` from the first redrive on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeliveryId {
    /// Id of the delivered message, action result or notice.
    pub source: SourceId,
    /// Id of the recipient.
    pub agent: AgentId,
    /// 0 for the original delivery, then 1, 2, ….
    pub redrive_no: i16,
}

impl fmt::Display for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "del_{}_{}", self.source, self.agent)?;
        if self.redrive_no > 0 {
            write!(f, "_r{}", self.redrive_no)?;
        }
        Ok(())
    }
}

impl Serialize for DeliveryId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for DeliveryId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let invalid = InvalidId { kind: "delivery" };
        let mut parts = text.strip_prefix("del_").ok_or(invalid)?.split('_');
        let mut next = || parts.next();
        let source: SourceId = next().ok_or(invalid)?.parse().map_err(|_| invalid)?;
        let agent: AgentId = next().ok_or(invalid)?.parse().map_err(|_| invalid)?;
        let redrive_no = match next() {
            None => 0,
            Some(suffix) => suffix.strip_prefix('r').and_then(|n| n.parse().ok()).filter(|n| *n > 0).ok_or(invalid)?,
        };
        let id = Self { source, agent, redrive_no };
        // Only the canonical text is accepted, so that one delivery has one id text.
        if id.to_string() == text { Ok(id) } else { Err(invalid) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_implicit_node_is_that_of_one_agent() {
        let agent = AgentId::new(42);
        assert_eq!(NodeId::direct(agent).direct_agent(), Some(agent));
        for other in ["node_42", "node_direct_", "node_direct_x", "42"] {
            assert_eq!(NodeId::new(other).direct_agent(), None, "{other}");
        }
    }

    #[test]
    fn a_delivery_id_reads_back_what_it_prints() {
        for text in ["del_12_7", "del_12_7_r1", "del_12_7_r30"] {
            assert_eq!(text.parse::<DeliveryId>().map(|id| id.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "del_", "del_1", "del_1_2_", "del_1_2_r0", "del_01_2", "del_1_2_r1_x", "del_-1_2"] {
            assert!(text.parse::<DeliveryId>().is_err(), "{text} is not a delivery id");
        }
    }

    #[test]
    fn a_stored_id_is_a_number() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Position {
            #[serde(with = "as_number")]
            action_id: ActionId,
            #[serde(default, skip_serializing_if = "Option::is_none", with = "as_number::option")]
            agent_id: Option<AgentId>,
        }
        for (position, stored) in [
            (Position { action_id: ActionId(-1), agent_id: Some(AgentId(7)) }, r#"{"action_id":-1,"agent_id":7}"#),
            (Position { action_id: ActionId(1), agent_id: None }, r#"{"action_id":1}"#),
        ] {
            assert_eq!(serde_json::to_string(&position).unwrap(), stored);
            assert_eq!(serde_json::from_str::<Position>(stored).unwrap(), position);
        }
        assert!(serde_json::from_str::<Position>(r#"{"action_id":"act_1"}"#).is_err());
        assert_eq!(serde_json::from_str::<Position>(r#"{"action_id":1,"agent_id":null}"#).unwrap().agent_id, None);
    }

    #[test]
    fn an_observer_token_id_reads_back_what_it_prints() {
        assert_eq!("ot_12".parse::<ObserverTokenId>().map(|id| id.to_string()).as_deref(), Ok("ot_12"));
        for text in ["", "ot_", "12", "ot_x", "ot_012", "ot_-1", "OT_12"] {
            assert!(text.parse::<ObserverTokenId>().is_err(), "{text} is not an observer token's id");
        }
    }

    #[test]
    fn a_prefixed_id_reads_back_what_it_prints() {
        assert_eq!("wh_12".parse::<WebhookId>().map(|id| id.to_string()).as_deref(), Ok("wh_12"));
        for text in ["", "12", "wh_", "wh_012", "wh_-1", "sub_12", "wh_wh_12", "WH_12"] {
            assert!(text.parse::<WebhookId>().is_err(), "{text} is no webhook id");
        }
    }

    #[test]
    fn a_snowflake_id_is_a_canonical_decimal_string() {
        assert_eq!("147298826957365248".parse::<MessageId>(), Ok(MessageId::new(147_298_826_957_365_248)));
        for text in ["", "-1", "+1", "01", "1.0", "9223372036854775808", "x"] {
            assert!(text.parse::<MessageId>().is_err(), "{text} is not an id");
        }
    }
}
