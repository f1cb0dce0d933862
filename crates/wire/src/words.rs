//! Enumerations of response fields with few values. The types only describe the schema and are never constructed.

use utoipa::ToSchema;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, ToSchema)]
        #[expect(missing_docs, reason = "the words are the documentation")]
        pub enum $name {
            $(#[schema(rename = $word)] $variant),+
        }
    };
}

words!(
    /// Availability of an agent, in the values that every published client accepts.
    Availability { Online = "online", Away = "away", Offline = "offline" }
);
words!(
    /// Reported activity of an agent.
    Activity { Active = "active", Idle = "idle", Blocked = "blocked", Waiting = "waiting", Offline = "offline" }
);
words!(
    /// Role of a channel member.
    Role { Owner = "owner", Member = "member" }
);
words!(
    /// State of a delivery.
    DeliveryStatus {
        Queued = "queued", Delivered = "delivered", Acked = "acked", Failed = "failed", DeadLettered = "dead_lettered"
    }
);
words!(
    /// Urgency of an injection.
    DeliveryMode { Immediate = "immediate", NextToolCall = "next-tool-call" }
);
words!(
    /// Kind of location that a recipient had when a delivery was accepted.
    LocationType { SelfConnected = "self_connected", ViaNode = "via_node" }
);
words!(
    /// Priority of a delivery.
    Priority { Normal = "normal" }
);
words!(
    /// Transport of deliveries to a node.
    NodeKind { Ws = "ws", HttpPush = "http_push", Poll = "poll" }
);
words!(
    /// Role of a node: one agent's own connection, or a host of many agents.
    NodeRole { Direct = "direct", Broker = "broker" }
);
words!(
    /// Connection status of a node.
    NodeStatus { Online = "online", Offline = "offline" }
);
words!(
    /// Plan of a workspace.
    Plan { Free = "free", Pro = "pro", Enterprise = "enterprise" }
);
words!(
    /// Type of a conversation: two fixed participants, or a group.
    ConversationType { Direct = "1:1", Group = "group" }
);
words!(
    /// Kind of data that an observer token may read.
    ObserverScope {
        Stream = "stream:read", Messages = "messages:read", Threads = "threads:read", Dms = "dms:read",
        Channels = "channels:read", Search = "search:read", Agents = "agents:read", Nodes = "nodes:read",
        Deliveries = "deliveries:read", Activity = "activity:read", Files = "files:read", Reactions = "reactions:read"
    }
);
words!(
    /// Status of an observer token.
    ObserverTokenStatus { Active = "active", Revoked = "revoked" }
);
words!(
    /// Place of a message in the activity list.
    ActivityType { Message = "message", Dm = "dm" }
);
words!(
    /// State of a file.
    FileStatus { Pending = "pending", Complete = "complete", Deleted = "deleted" }
);
words!(
    /// State of an event delivery to a subscription's URL.
    SubscriptionDeliveryStatus { Pending = "pending", Delivered = "delivered", DeadLetter = "dead_letter" }
);
