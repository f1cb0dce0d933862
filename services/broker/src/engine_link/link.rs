//! [`EngineLink`]: the handle of the node socket.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use relay_wire::nodes::{
    engine_frame::{ActionInvoke, ErrorReply},
    frame::{ActionAccept, ActionResult, AgentDeregister, AgentRegister, InboundFrame},
    replies::RegisteredAgent,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use super::{
    acks::Acks,
    hosted::{HostedAgent, HostedAgents},
    manifest::Manifest,
};

use crate::{api::types::RunnerManifest, insight::count_dropped, mailbox::MailboxLength};

/// Time for registering an agent, waiting for a connection included.
const HOST_TIMEOUT: Duration = Duration::from_secs(20);

/// State of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// Not registered; the reason of the last end, if there was one.
    Down {
        reason: Option<String>,
    },
    Up,
    /// Left for good.
    Left,
}

/// Failed request to the engine.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LinkError {
    /// There was no connection for as long as the request may take.
    #[error("the engine cannot be reached")]
    Unavailable,
    /// The engine refused.
    #[error("the engine refused the request: {} ({})", .0.message, .0.code)]
    Refused(ErrorReply),
}

/// Registration of a runner's manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registration {
    /// The engine has accepted it.
    Accepted,
    /// It is registered with the next connection.
    Pending,
}

/// Registration of an agent. Its mailbox is in place before the first frame for it is read.
#[derive(Debug)]
pub(crate) struct HostRequest {
    pub(crate) frame: AgentRegister,
    /// Messages that the agent's session has already.
    pub(crate) had: Vec<String>,
    pub(super) reply: oneshot::Sender<Result<HostedAgent, ErrorReply>>,
}

/// Frame for the connection.
#[derive(Debug)]
pub(super) enum LinkRequest {
    Host(Box<HostRequest>),
    Register(Box<Manifest>, oneshot::Sender<Result<(), ErrorReply>>),
    /// Deregisters the provider and registers again, with the manifest of that moment.
    Renew,
    /// Sent once a connection is registered.
    Send(Box<InboundFrame>),
}

/// State that handle and connection share.
#[derive(Debug)]
pub(super) struct LinkShared {
    pub(super) hosted: HostedAgents,
    pub(super) acks: Acks,
    pub(super) state: watch::Sender<LinkState>,
    /// Manifest registered with the next connection.
    pub(super) manifest: watch::Sender<Manifest>,
    /// The manifest without a runner.
    pub(super) bootstrap: Manifest,
    /// Frames that a mailbox refused can now be taken.
    pub(super) has_room: AtomicBool,
    /// Requests that wait for the engine's reply.
    pub(super) waiting_replies: AtomicUsize,
    /// Frames that wait to be written to the socket of the newest connection.
    pub(super) socket_queue: Mutex<Option<mpsc::WeakSender<Message>>>,
    /// Changed when the engine has refused what a runner offers, after the runner was told that it is registered with
    /// the next connection.
    pub(super) runner_refused: watch::Sender<()>,
    pub(super) stop: CancellationToken,
}

/// Handle of the node socket. Clones are the same link.
#[derive(Debug, Clone)]
pub(crate) struct EngineLink {
    pub(super) shared: Arc<LinkShared>,
    pub(super) requests: mpsc::Sender<LinkRequest>,
    /// Weak: the handler of invocations ends with the task of the link.
    pub(super) invocations: mpsc::WeakSender<ActionInvoke>,
}

impl EngineLink {
    /// Registers an agent and its mailbox; waits for a connection.
    ///
    /// # Errors
    /// If the engine refuses, or cannot be reached within 20 s.
    pub(crate) async fn host(&self, frame: AgentRegister, had: Vec<String>) -> Result<HostedAgent, LinkError> {
        let attempts = async {
            loop {
                self.wait_up().await?;
                let (reply, answer) = oneshot::channel();
                // Clones, since a connection that is lost takes the request with it.
                let request = HostRequest { frame: frame.clone(), had: had.clone(), reply };
                let sent = self.requests.send(LinkRequest::Host(Box::new(request))).await;
                sent.map_err(|_| LinkError::Unavailable)?;
                match answer.await {
                    Ok(Ok(agent)) => return Ok(agent),
                    Ok(Err(refused)) => return Err(LinkError::Refused(refused)),
                    // The connection was lost; the next one gets the request.
                    Err(_) => {}
                }
            }
        };
        timeout(HOST_TIMEOUT, attempts).await.unwrap_or(Err(LinkError::Unavailable))
    }

    /// Adopts an agent that was bound over REST.
    pub(crate) fn adopt(&self, name: &str, agent: HostedAgent) {
        // Before the inventory that names it: from then on the engine sends its messages.
        self.shared.hosted.insert(name, agent);
        self.announce();
    }

    /// Ends the hosting of an agent and tells the engine.
    pub(crate) fn unhost(&self, name: &str, agent_id: &str) {
        // Removed first, so that no inventory in between names it again.
        if self.shared.hosted.remove(name, agent_id) {
            let frame = AgentDeregister { agent_id: agent_id.to_owned() };
            self.send(InboundFrame::AgentDeregister(frame));
            self.announce();
        }
    }

    /// Sends inventory and heartbeat, as after every change.
    pub(crate) fn announce(&self) {
        // One permit is kept: changes during a send lead to one more inventory, and none is missed.
        self.shared.hosted.changed.notify_one();
    }

    /// Acknowledges an agent's messages up to a position.
    pub(crate) fn ack(&self, agent: &str, up_to_seq: u64) {
        self.shared.acks.put(agent, up_to_seq);
    }

    /// Reports the end of an invocation.
    pub(crate) fn send_result(&self, result: ActionResult) {
        self.send(InboundFrame::ActionResult(result));
    }

    /// Keeps an invocation that takes longer.
    pub(crate) fn accept(&self, invocation_id: &str) {
        self.send(InboundFrame::ActionAccept(ActionAccept { invocation_id: invocation_id.to_owned() }));
    }

    /// Registers what a runner offers. A refusal leaves the manifest as it was.
    pub(crate) async fn register_runner(&self, runner: RunnerManifest) -> Result<Registration, ErrorReply> {
        let mut manifest = self.shared.bootstrap.with_runner(runner);
        // A runner that registers once more has its handlers still.
        manifest.handlers_live = self.shared.manifest.borrow().handlers_live;
        if self.is_up() {
            let (reply, answer) = oneshot::channel();
            let request = LinkRequest::Register(Box::new(manifest.clone()), reply);
            if self.requests.send(request).await.is_ok()
                && let Ok(outcome) = answer.await
            {
                return outcome.map(|()| Registration::Accepted);
            }
        }
        // No connection, or it was lost before the answer: the next one registers this manifest.
        self.shared.manifest.send_replace(manifest);
        Ok(Registration::Pending)
    }

    /// Tells the engine whether a runner has handlers.
    pub(crate) fn set_handlers_live(&self, is_live: bool) {
        // A broker with `--spawn` handles spawns itself, with or without a runner.
        let handlers_live = is_live || self.shared.bootstrap.handlers_live;
        self.shared.manifest.send_modify(|manifest| manifest.handlers_live = handlers_live);
        self.announce();
    }

    /// Returns whether a runner's offer is registered, or is to be.
    pub(crate) fn offers_runner(&self) -> bool {
        !self.shared.manifest.borrow().is_same_offer(&self.shared.bootstrap)
    }

    /// Withdraws what a runner offered.
    pub(crate) fn withdraw(&self) {
        // Before the request: `Renew` registers the manifest that is current when it is handled.
        self.shared.manifest.send_replace(self.shared.bootstrap.clone());
        if self.requests.try_send(LinkRequest::Renew).is_err() {
            tracing::debug!("no connection takes requests, the next one registers without the runner");
        }
    }

    /// The registered manifest.
    pub(crate) fn manifest(&self) -> Manifest {
        self.shared.manifest.borrow().clone()
    }

    /// A mailbox has room again: the connection is renewed soon, so that the engine repeats what was refused.
    pub(crate) fn fetch_refused(&self) {
        // Relaxed: the flag is read once a second, and no other memory depends on it.
        self.shared.has_room.store(true, Ordering::Relaxed);
    }

    /// Changes when the engine refuses the manifest of a runner after it was accepted here.
    pub(crate) fn runner_refusals(&self) -> watch::Receiver<()> {
        self.shared.runner_refused.subscribe()
    }

    /// Requests that wait for the connection.
    pub(crate) fn waiting_requests(&self) -> usize {
        self.requests.max_capacity() - self.requests.capacity()
    }

    /// Requests that wait for the engine's reply, as of the last second.
    pub(crate) fn waiting_replies(&self) -> usize {
        self.shared.waiting_replies.load(Ordering::Relaxed)
    }

    /// Frames that wait to be written; none without a connection.
    pub(crate) fn waiting_frames(&self) -> usize {
        let queue = self.shared.socket_queue.lock().unwrap_or_else(PoisonError::into_inner);
        let open = queue.as_ref().and_then(mpsc::WeakSender::upgrade);
        open.map_or(0, |frames| frames.max_capacity() - frames.capacity())
    }

    /// Invocations that wait to be handled.
    pub(crate) fn waiting_invocations(&self) -> usize {
        self.invocations.upgrade().map_or(0, |sender| sender.max_capacity() - sender.capacity())
    }

    /// Entries of the mailboxes.
    pub(crate) fn mailbox_lengths(&self) -> Vec<MailboxLength> {
        self.shared.hosted.mailboxes().iter().map(|(_, mailbox)| mailbox.length()).collect()
    }

    /// Returns whether the node is registered.
    pub(crate) fn is_up(&self) -> bool {
        *self.shared.state.borrow() == LinkState::Up
    }

    /// Says goodbye to the engine and waits until that is done.
    pub(crate) async fn leave(&self) {
        self.shared.stop.cancel();
        // The sender is in `shared`, so the channel is open.
        let _ = self.shared.state.subscribe().wait_for(|state| *state == LinkState::Left).await;
    }

    /// Waits for a registered connection.
    pub(crate) async fn wait_up(&self) -> Result<(), LinkError> {
        let mut state = self.shared.state.subscribe();
        let reached = state.wait_for(|state| !matches!(state, LinkState::Down { .. })).await;
        match reached.as_deref() {
            Ok(LinkState::Up) => Ok(()),
            Ok(LinkState::Down { .. } | LinkState::Left) | Err(_) => Err(LinkError::Unavailable),
        }
    }

    /// Without room the engine is unavailable for long: it learns of ended agents from the next inventory, and takes
    /// invocations without a result back.
    fn send(&self, frame: InboundFrame) {
        if self.requests.try_send(LinkRequest::Send(Box::new(frame))).is_err() {
            count_dropped("link_requests");
            tracing::warn!("too many frames wait for the engine, one is dropped");
        }
    }
}

impl LinkShared {
    /// The engine has refused this manifest. Restores the one without a runner, so that hosted agents get their
    /// messages. Returns `false` if it was that one.
    pub(super) fn refuse_runner(&self, refused: &Manifest) -> bool {
        if refused.is_same_offer(&self.bootstrap) {
            return false;
        }
        self.manifest.send_if_modified(|manifest| {
            // A runner may have sent another one meanwhile.
            let is_refused = manifest == refused;
            if is_refused {
                *manifest = self.bootstrap.clone();
            }
            is_refused
        });
        self.runner_refused.send_replace(());
        true
    }

    /// Puts the mailbox of a registered agent in place.
    pub(super) fn host(&self, own_agent_id: &str, request: &HostRequest, registered: &RegisteredAgent) -> HostedAgent {
        // Without a cursor the engine probes for the position, finds 0, and sends everything from seq 1 (ADR 0002).
        let cursor = registered.delivery_ack_seq.unwrap_or(0);
        let had = request.had.iter().cloned();
        let mailbox = crate::mailbox::Mailbox::new(&registered.agent_id, own_agent_id, cursor, had);
        let agent = HostedAgent {
            agent_id: registered.agent_id.clone(),
            token: registered.token.clone(),
            invocation_id: request.frame.invocation_id.clone(),
            session_ref: request.frame.session_ref.clone(),
            mailbox: Arc::new(crate::mailbox::SharedMailbox::new(mailbox)),
        };
        self.hosted.insert(&request.frame.name, agent.clone());
        agent
    }
}
