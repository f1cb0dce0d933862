//! [`LinkTask`]: connects, serves the connection until its end, waits, and connects again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use relay_wire::nodes::engine_frame::ActionInvoke;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_tungstenite::tungstenite;
use tokio_util::sync::CancellationToken;

use super::{
    acks::Acks,
    backoff::Backoff,
    connection::{Connection, End},
    dial::{Socket, dial},
    hosted::HostedAgents,
    link::{EngineLink, LinkRequest, LinkShared, LinkState},
    manifest::Manifest,
    repeats::Repeats,
};
use crate::{
    api::types::Event,
    clock,
    engine::{Engine, Identity},
    events::Hub,
    metric_names,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of tokens requested in a row, when each is refused at once.
// Each token ends the one before: two processes with one node id would revoke each other's without end.
const MAX_TOKENS: u32 = 5;
/// After this time without any, tokens are asked for again.
const TOKENS_EVERY: Duration = Duration::from_secs(10 * 60);
/// Requests that wait for the connection. Callers wait for room beyond it.
const REQUESTS: usize = 256;

/// Facts that the link needs.
#[derive(Debug)]
pub(crate) struct LinkSettings {
    pub(crate) engine: Engine,
    pub(crate) identity: Identity,
    /// Base of the socket's URL, if it differs from the engine's.
    pub(crate) socket_base: Option<String>,
    pub(crate) hub: Arc<Hub>,
    /// The manifest without a runner.
    pub(crate) manifest: Manifest,
    pub(crate) invocations: mpsc::Sender<ActionInvoke>,
}

/// Keeps the node connected. Runs until [`EngineLink::leave`].
#[derive(Debug)]
pub(crate) struct LinkTask {
    settings: LinkSettings,
    shared: Arc<LinkShared>,
    requests: mpsc::Receiver<LinkRequest>,
    repeats: Repeats,
}

impl LinkTask {
    pub(crate) fn new(settings: LinkSettings) -> (EngineLink, Self) {
        let (sender, requests) = mpsc::channel(REQUESTS);
        let shared = Arc::new(LinkShared {
            hosted: HostedAgents::default(),
            acks: Acks::default(),
            state: watch::Sender::new(LinkState::Down { reason: None }),
            manifest: watch::Sender::new(settings.manifest.clone()),
            bootstrap: settings.manifest.clone(),
            has_room: AtomicBool::new(false),
            waiting_replies: AtomicUsize::new(0),
            socket_queue: Mutex::default(),
            runner_refused: watch::Sender::new(()),
            stop: CancellationToken::new(),
        });
        (
            EngineLink { shared: shared.clone(), requests: sender, invocations: settings.invocations.downgrade() },
            Self { settings, shared, requests, repeats: Repeats::default() },
        )
    }

    pub(crate) async fn run(mut self) {
        let mut backoff = Backoff::default();
        let mut refused_tokens = 0;
        let mut asked_at = Instant::now();
        loop {
            let began = Instant::now();
            if began.duration_since(asked_at) >= TOKENS_EVERY {
                refused_tokens = 0;
            }
            let stop = self.shared.stop.clone();
            let Some(opened) = stop.run_until_cancelled(self.open()).await else { break };
            let reason = match opened {
                Ok(socket) => {
                    refused_tokens = 0;
                    match self.serve(socket).await {
                        End::Left => break,
                        // The state stays `Up`: requests wait in their channel for the moment until the next
                        // registration.
                        End::Renewed => continue,
                        End::Lost(reason) => reason,
                    }
                }
                // The token is not valid any more, after a rotation for example. The workspace key gets another one.
                Err(OpenError::TokenRefused) if refused_tokens < MAX_TOKENS => {
                    refused_tokens += 1;
                    asked_at = Instant::now();
                    let enrolment = self.settings.identity.enrol(&self.settings.engine);
                    match stop.run_until_cancelled(enrolment).await {
                        Some(Ok(())) => continue,
                        Some(Err(error)) => error.to_string(),
                        None => break,
                    }
                }
                Err(error) => error.to_string(),
            };
            let pause = backoff.pause(began.elapsed(), rand_fraction());
            tracing::warn!(reason, pause_ms = clock::millis(pause), "the engine is not connected, connecting again");
            metrics::counter!(metric_names::CONNECTIONS_LOST).increment(1);
            self.shared.state.send_replace(LinkState::Down { reason: Some(reason) });
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                break;
            }
        }
        self.shared.state.send_replace(LinkState::Left);
    }

    async fn open(&self) -> Result<Socket, OpenError> {
        let base = self.settings.socket_base.as_deref().unwrap_or(self.settings.engine.base_url());
        let base = base.trim_end_matches('/');
        let url = match base.strip_prefix("http") {
            // Turns `https` into `wss` as well.
            Some(rest) => format!("ws{rest}/v1/node/ws"),
            None => format!("{base}/v1/node/ws"),
        };
        match timeout(CONNECT_TIMEOUT, dial(&url, &self.settings.identity.node_token)).await {
            Ok(Ok(socket)) => Ok(socket),
            Ok(Err(tungstenite::Error::Http(answer))) if answer.status().as_u16() == 401 => {
                Err(OpenError::TokenRefused)
            }
            Ok(Err(error)) => Err(OpenError::Failed(format!("cannot connect to {url}: {error}"))),
            Err(_) => Err(OpenError::Failed(format!("{url} has not answered in time"))),
        }
    }

    async fn serve(&mut self, socket: Socket) -> End {
        // Before the registration, after which the engine repeats everything above the acks.
        for (_, mailbox) in self.shared.hosted.mailboxes() {
            mailbox.on_reconnected();
        }
        // Everything that was refused is about to come again.
        self.shared.has_room.store(false, Ordering::Relaxed);
        let gateway = self.settings.engine.base_url().to_owned();
        let name = self.settings.identity.node_name.clone();
        let connection = Connection::new(&self.settings, &self.shared, &mut self.requests, &mut self.repeats, socket);
        let hub = self.settings.hub.clone();
        let registered = |gateway: String| hub.publish(&name, &Event::NodeConnected { gateway, reason: None });
        let (end, was_registered) = connection.run(|| registered(gateway.clone())).await;
        if was_registered {
            let reason = match &end {
                End::Left | End::Renewed => None,
                End::Lost(reason) => Some(reason.clone()),
            };
            self.settings.hub.publish(&name, &Event::NodeDisconnected { gateway, reason });
        }
        end
    }
}

/// Reason why no socket was opened.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("the engine refuses the node's token")]
    TokenRefused,
    #[error("{0}")]
    Failed(String),
}

/// A number between 0 and 1 from a random id; spreading connections needs no more.
fn rand_fraction() -> f64 {
    f64::from(uuid::Uuid::new_v4().as_fields().0) / f64::from(u32::MAX)
}
