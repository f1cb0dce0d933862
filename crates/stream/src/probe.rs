//! Asking a gateway whether one of its sockets is alive.

use std::time::Duration;

use futures::StreamExt as _;
use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceId, takeover::Proof};
use serde::{Deserialize, Serialize};

use crate::{Stream, StreamError, StreamResult, subjects};

/// How long the asker waits: the holder gives its socket one second to answer a ping.
const PROBE_WAIT: Duration = Duration::from_millis(1500);

/// Which connection is asked about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// The tenant.
    pub workspace: WorkspaceId,
    /// The node.
    pub node: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The epoch of the connection.
    pub epoch: i64,
}

/// Probes addressed to this gateway.
pub struct Probes {
    subscriber: async_nats::Subscriber,
}

impl Probes {
    /// The next probe and where to answer it.
    pub async fn next(&mut self) -> Option<(ProbeRequest, String)> {
        loop {
            let message = self.subscriber.next().await?;
            let request = serde_json::from_slice(&message.payload).ok();
            if let (Some(request), Some(reply)) = (request, message.reply) {
                return Some((request, reply.to_string()));
            }
        }
    }
}

impl Stream {
    /// Asks a gateway for a proof of life. No answer in time, or nobody there, is silence.
    pub async fn probe(&self, gateway: GatewayId, request: &ProbeRequest) -> Proof {
        let Ok(payload) = serde_json::to_vec(request) else { return Proof::Silent };
        let answer = self.client.request(subjects::probe_subject(gateway), payload.into());
        match tokio::time::timeout(PROBE_WAIT, answer).await {
            Ok(Ok(message)) if message.payload.as_ref() == b"alive" => Proof::Alive,
            _ => Proof::Silent,
        }
    }

    /// Answers a probe.
    pub async fn answer_probe(&self, reply: String, proof: Proof) {
        let word: &'static [u8] = match proof {
            Proof::Alive => b"alive",
            Proof::Silent => b"silent",
        };
        if let Err(error) = self.client.publish(reply, word.into()).await {
            tracing::debug!(%error, "a probe was not answered");
        }
    }

    /// Listens to the probes addressed to a gateway.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn probes(&self, gateway: GatewayId) -> StreamResult<Probes> {
        let subscriber = self
            .client
            .subscribe(subjects::probe_subject(gateway))
            .await
            .map_err(StreamError::from_nats("listening to probes"))?;
        Ok(Probes { subscriber })
    }
}
