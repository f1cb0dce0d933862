//! Liveness probes: requests to a gateway to check one of its sockets.

use std::time::Duration;

use futures::StreamExt as _;
use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceId, nodes::takeover::ProbeOutcome};
use serde::{Deserialize, Serialize};

use crate::{Stream, StreamError, StreamResult, subjects};

/// Time to wait for an answer. The gateway gives its socket one second to answer a ping.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1500);

/// Identity of the connection to check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// Id of the workspace.
    pub workspace: WorkspaceId,
    /// Id of the node.
    pub node: NodeId,
    /// Name of the provider.
    pub provider: ProviderName,
    /// Epoch of the connection.
    pub epoch: i64,
}

/// Subscription to the probes of this gateway.
pub struct Probes {
    subscriber: async_nats::Subscriber,
}

impl Probes {
    /// Returns the next probe and the subject for its answer, or `None` once the client is closed.
    pub async fn next(&mut self) -> Option<(ProbeRequest, String)> {
        loop {
            let message = self.subscriber.next().await?;
            let request = serde_json::from_slice(&message.payload).ok();
            // A request that cannot be read gets no answer, which counts as silent.
            if let (Some(request), Some(reply)) = (request, message.reply) {
                return Some((request, reply.to_string()));
            }
        }
    }
}

impl Stream {
    /// Probes a connection through its gateway. A missing answer counts as silent.
    pub async fn probe(&self, gateway: GatewayId, request: &ProbeRequest) -> ProbeOutcome {
        let Ok(payload) = serde_json::to_vec(request) else { return ProbeOutcome::Silent };
        let answer = self.client.request(subjects::probe_subject(gateway), payload.into());
        match tokio::time::timeout(PROBE_TIMEOUT, answer).await {
            Ok(Ok(message)) if message.payload.as_ref() == b"alive" => ProbeOutcome::Alive,
            // In doubt the newcomer takes over, and the epoch fences the incumbent (ADR 0005).
            _ => ProbeOutcome::Silent,
        }
    }

    /// Answers a probe.
    pub async fn answer_probe(&self, reply: String, proof: ProbeOutcome) {
        // Without a code: a forged answer shows no frame, and epochs decide between the two connections (ADR 0033).
        let word: &'static [u8] = match proof {
            ProbeOutcome::Alive => b"alive",
            ProbeOutcome::Silent => b"silent",
        };
        if let Err(error) = self.client.publish(reply, word.into()).await {
            tracing::debug!(%error, "failed to answer a probe");
        }
    }

    /// Subscribes to the probes of a gateway.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn subscribe_probes(&self, gateway: GatewayId) -> StreamResult<Probes> {
        let subscriber = self
            .client
            .subscribe(subjects::probe_subject(gateway))
            .await
            .map_err(StreamError::from_nats("listening to probes"))?;
        Ok(Probes { subscriber })
    }
}
