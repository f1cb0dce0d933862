//! The words that answers carry where a field has few values. The types describe; nothing is made of them.

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
    /// Whether an agent is there, in the words that every published client knows.
    Availability { Online = "online", Away = "away", Offline = "offline" }
);
words!(
    /// What an agent is doing.
    Activity { Active = "active", Idle = "idle", Blocked = "blocked", Waiting = "waiting", Offline = "offline" }
);
words!(
    /// What a member of a channel may do.
    Role { Owner = "owner", Member = "member" }
);
words!(
    /// What is known of a delivery.
    DeliveryStatus {
        Queued = "queued", Delivered = "delivered", Acked = "acked", Failed = "failed", DeadLettered = "dead_lettered"
    }
);
words!(
    /// How urgently a delivery is injected.
    DeliveryMode { Immediate = "immediate", NextToolCall = "next-tool-call" }
);
words!(
    /// Where a recipient was when a delivery was accepted.
    LocationType { SelfConnected = "self_connected", ViaNode = "via_node" }
);
words!(
    /// How important a delivery is.
    Priority { Normal = "normal" }
);
words!(
    /// How a node is reached.
    NodeKind { Ws = "ws", HttpPush = "http_push", Poll = "poll" }
);
words!(
    /// Whether a node is one agent's own connection or hosts many.
    NodeRole { Direct = "direct", Broker = "broker" }
);
words!(
    /// Whether a node is connected.
    NodeStatus { Online = "online", Offline = "offline" }
);
words!(
    /// What a workspace is allowed.
    Plan { Free = "free", Pro = "pro", Enterprise = "enterprise" }
);
words!(
    /// Whether a conversation has two members for good, or any number.
    ConversationType { Direct = "1:1", Group = "group" }
);
words!(
    /// What an observer token may read.
    ObserverScope {
        Stream = "stream:read", Messages = "messages:read", Threads = "threads:read", Dms = "dms:read",
        Channels = "channels:read", Search = "search:read", Agents = "agents:read", Nodes = "nodes:read",
        Deliveries = "deliveries:read", Activity = "activity:read", Files = "files:read", Reactions = "reactions:read"
    }
);
words!(
    /// Whether an observer token counts.
    ObserverTokenStatus { Active = "active", Revoked = "revoked" }
);
words!(
    /// Where a message of the activity is.
    ActivityType { Message = "message", Dm = "dm" }
);
words!(
    /// What became of a file.
    FileStatus { Pending = "pending", Complete = "complete", Deleted = "deleted" }
);
words!(
    /// What became of an event on its way to a subscription's address.
    SubscriptionDeliveryStatus { Pending = "pending", Delivered = "delivered", DeadLetter = "dead_letter" }
);
