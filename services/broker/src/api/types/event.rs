//! Events as drivers read them: on `/ws` and in the answer of `/api/events/replay`.

use relay_verification::{Level, channel::INJECTED_METHOD};
use serde::Serialize;
use serde_json::Value;

/// An event with its place among the others.
#[derive(Debug, Serialize)]
pub(crate) struct EventFrame<'a> {
    #[serde(flatten)]
    pub(crate) event: &'a Event,
    /// Name of the agent.
    pub(crate) name: &'a str,
    /// Unix time in milliseconds.
    pub(crate) timestamp: i64,
    /// Number of a durable event; none for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seq: Option<u64>,
}

/// First frame of a reader whose position is not kept any more.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename = "replay_gap", rename_all = "camelCase")]
pub(crate) struct ReplayGap {
    pub(crate) requested_since_seq: u64,
    pub(crate) oldest_available: u64,
}

/// Something that happened to an agent. Names of fields and kinds are those that published drivers read.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Event {
    AgentSpawned {
        #[serde(flatten)]
        process: ProcessFacts,
        parent: Option<String>,
        source: &'static str,
        pre_registered: bool,
        registration_warning: Option<String>,
    },
    WorkerReady {
        #[serde(flatten)]
        process: ProcessFacts,
    },
    AgentReleased {
        reason: Option<String>,
    },
    AgentExit {
        reason: &'static str,
    },
    AgentExited {
        code: Option<i32>,
        signal: Option<String>,
        reason: &'static str,
    },
    AgentRestarting {
        code: Option<i32>,
        signal: Option<String>,
        restart_count: u32,
        delay_ms: u64,
    },
    AgentRestarted {
        restart_count: u32,
        pid: i32,
    },
    AgentPermanentlyDead {
        reason: String,
    },
    AgentIdle {
        idle_secs: u64,
        since: i64,
    },
    AgentBlockedOnSend {
        blocked_secs: u64,
        pending_delivery_count: usize,
    },
    AgentContextLow {
        pct: u8,
    },
    AgentResult {
        result_id: String,
        data: Value,
        r#final: bool,
        metadata: Value,
    },
    WorkerStream {
        stream: &'static str,
        chunk: String,
    },
    WorkerError {
        code: &'static str,
        message: String,
        error: ErrorText,
    },
    RelayInbound {
        event_id: String,
        from: String,
        target: String,
        body: String,
        thread_id: Option<String>,
        mode: &'static str,
        injection_mode: &'static str,
        workspace_id: String,
        workspace_alias: Option<String>,
    },
    DeliveryQueued {
        #[serde(flatten)]
        delivery: DeliveryRef,
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<&'static str>,
    },
    DeliveryInjected {
        #[serde(flatten)]
        delivery: DeliveryRef,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryAck {
        #[serde(flatten)]
        delivery: DeliveryRef,
        verified: bool,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryVerified {
        #[serde(flatten)]
        delivery: DeliveryRef,
        verification: &'static str,
        verified: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        detail: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<&'static str>,
        latency_ms: u64,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryUpgraded {
        #[serde(flatten)]
        delivery: DeliveryRef,
        latency_ms: u64,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryActive {
        #[serde(flatten)]
        delivery: DeliveryRef,
        pattern: String,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryRetry {
        #[serde(flatten)]
        delivery: DeliveryRef,
        attempts: u32,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryFailed {
        #[serde(flatten)]
        delivery: DeliveryRef,
        reason: &'static str,
        #[serde(flatten)]
        proven: DeliveryProof,
    },
    DeliveryDropped {
        count: usize,
        reason: &'static str,
    },
    DeliveryReadAck {
        #[serde(flatten)]
        delivery: DeliveryRef,
        status: &'static str,
        reason: Option<String>,
    },
    MessageDeliveryConfirmed {
        #[serde(flatten)]
        delivery: DeliveryRef,
        from: String,
        to: String,
    },
    MessageDeliveryFailed {
        #[serde(flatten)]
        delivery: DeliveryRef,
        from: String,
        to: String,
        attempts: u32,
        #[serde(rename = "lastError")]
        last_error: &'static str,
    },
    AgentInboundDeliveryModeChanged {
        previous_mode: &'static str,
        mode: &'static str,
    },
    AgentPendingDrained {
        count: usize,
        reason: &'static str,
    },
    ChannelSubscribed {
        channels: Vec<String>,
    },
    ChannelUnsubscribed {
        channels: Vec<String>,
    },
    NodeConnected {
        gateway: String,
        reason: Option<String>,
    },
    NodeDisconnected {
        gateway: String,
        reason: Option<String>,
    },
}

/// Facts about an agent's process.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ProcessFacts {
    pub(crate) runtime: &'static str,
    pub(crate) provider: Option<String>,
    pub(crate) cli: String,
    pub(crate) model: Option<String>,
    #[serde(rename = "sessionId")]
    pub(crate) session_id: Option<String>,
    /// None without a terminal.
    pub(crate) pid: Option<i32>,
}

/// Names a delivery.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DeliveryRef {
    pub(crate) delivery_id: String,
    pub(crate) event_id: String,
}

/// Proven progress of a delivery.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DeliveryProof {
    pub(crate) attempt: u32,
    pub(crate) level: Level,
    pub(crate) confidence: &'static str,
    pub(crate) method: &'static str,
}

impl DeliveryProof {
    /// For a message of which nothing is known but that it was handed over, in this attempt.
    pub(crate) fn injected(attempt: u32) -> Self {
        Self { attempt, level: Level::Injected, confidence: INJECTED_METHOD, method: INJECTED_METHOD }
    }
}

/// An error, nested as published drivers expect it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ErrorText {
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) retryable: bool,
}

impl Event {
    /// An error of an agent.
    pub(crate) fn worker_error(code: &'static str, message: String, retryable: bool) -> Self {
        Self::WorkerError { code, message: message.clone(), error: ErrorText { code, message, retryable } }
    }
}
