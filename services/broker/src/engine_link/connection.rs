//! [`Connection`]: one node socket from its registration to its end.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use futures::{StreamExt as _, stream::SplitStream};
use relay_wire::nodes::{
    engine_frame::{self, ErrorReply},
    frame::{Ack, InboundFrame, Inventory},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, interval, sleep_until, timeout},
};
use tokio_tungstenite::tungstenite::{Message, protocol::CloseFrame, protocol::frame::coding::CloseCode};

use super::{
    dial::Socket,
    link::{LinkRequest, LinkShared, LinkState},
    manifest::Manifest,
    outbox::Outbox,
    pending::{PendingRequests, WaitingRequest},
    repeats::Repeats,
    task::LinkSettings,
};
use crate::events::Hub;

// The engine tries for 8 s while its storage is unavailable, and closes the socket with 1013 then.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
// The engine counts a provider as silent after 45 s: two heartbeats in a row may be lost.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(12);
const INVENTORY_EVERY: Duration = Duration::from_secs(60);
/// Time without an inbound frame after which the connection is closed.
// Four times `HEARTBEAT_EVERY`: about three pings have had no pong by then.
const SILENCE: Duration = Duration::from_secs(48);
/// Acks that come within this time are written together.
const ACK_DELAY: Duration = Duration::from_millis(20);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// End of a connection.
#[derive(Debug)]
pub(super) enum End {
    /// The broker has said goodbye.
    Left,
    /// Deregistered, to register again at once.
    Renewed,
    /// Broken, closed by the engine, or given up.
    Lost(String),
}

pub(super) struct Connection<'a> {
    pub(super) own_agent_id: &'a str,
    pub(super) hub: &'a Hub,
    pub(super) invocations: &'a mpsc::Sender<engine_frame::ActionInvoke>,
    pub(super) shared: &'a Arc<LinkShared>,
    pub(super) requests: &'a mut mpsc::Receiver<LinkRequest>,
    pub(super) stream: SplitStream<Socket>,
    pub(super) outbox: Outbox,
    pub(super) pending: PendingRequests,
    pub(super) last_inbound: Instant,
    pub(super) last_heartbeat: Instant,
    pub(super) last_inventory: Instant,
    pub(super) repeats: &'a mut Repeats,
    /// Since when the engine is expected to close the deregistered connection.
    pub(super) renewed_at: Option<Instant>,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        settings: &'a LinkSettings,
        shared: &'a Arc<LinkShared>,
        requests: &'a mut mpsc::Receiver<LinkRequest>,
        repeats: &'a mut Repeats,
        socket: Socket,
    ) -> Self {
        let (sink, stream) = socket.split();
        let outbox = Outbox::new(sink);
        *shared.socket_queue.lock().unwrap_or_else(PoisonError::into_inner) = Some(outbox.queue());
        let now = Instant::now();
        Self {
            own_agent_id: &settings.identity.agent_id,
            hub: &settings.hub,
            invocations: &settings.invocations,
            shared,
            requests,
            stream,
            outbox,
            // New with each connection, since a reply comes on the connection of its request. Callers on the previous
            // one see their replies dropped, and repeat what they still need.
            pending: PendingRequests::default(),
            last_inbound: now,
            last_heartbeat: now,
            last_inventory: now,
            repeats,
            renewed_at: None,
        }
    }

    /// Registers and serves until the end. Returns whether it was registered.
    pub(super) async fn run(mut self, on_registered: impl FnOnce()) -> (End, bool) {
        if let Err(reason) = self.register().await {
            return (End::Lost(reason), false);
        }
        on_registered();
        let served = self.serve().await;
        // No tick of this connection clears the gauge any more.
        self.shared.waiting_replies.store(0, Ordering::Relaxed);
        let end = match served {
            Ok(()) => {
                self.leave().await;
                End::Left
            }
            // The engine closes the socket of a provider that has deregistered. That is expected and needs no pause.
            Err(_) if self.renewed_at.is_some() => End::Renewed,
            Err(reason) => End::Lost(reason),
        };
        (end, true)
    }

    async fn register(&mut self) -> Result<(), String> {
        let manifest = self.shared.manifest.borrow().clone();
        let mut outcome = self.register_manifest(&manifest).await?;
        // A runner's offer that the engine refuses must not take the hosted agents off the engine.
        if outcome.is_err() && self.shared.refuse_runner(&manifest) {
            outcome = self.register_manifest(&self.shared.bootstrap.clone()).await?;
        }
        outcome.map_err(|refused| format!("the registration was refused: {} ({})", refused.message, refused.code))?;
        // The inventory first: an engine that handles frames in order counts acks only for agents it serves here.
        // Others ask for the position. All positions are repeated, because acks that the last connection took may not
        // have arrived.
        self.announce()?;
        for (name, mailbox) in self.shared.hosted.mailboxes() {
            self.send_ack(&name, mailbox.acked())?;
        }
        // Last, so that requests that wait for a connection follow the registration.
        self.shared.state.send_replace(LinkState::Up);
        Ok(())
    }

    /// Registers a manifest and returns the engine's answer.
    async fn register_manifest(&mut self, manifest: &Manifest) -> Result<Result<(), ErrorReply>, String> {
        let (reply, mut answer) = oneshot::channel();
        let frame = InboundFrame::Register(Box::new(manifest.register()));
        self.request(WaitingRequest::Register(reply), &frame)?;
        let deadline = Instant::now() + REGISTER_TIMEOUT;
        loop {
            tokio::select! {
                message = self.stream.next() => self.on_message(message)?,
                () = sleep_until(deadline) => return Err("the engine has not answered the registration".to_owned()),
            }
            // `on_message` has fulfilled it if the frame was the reply. Other frames may come first and are handled as
            // usual.
            match answer.try_recv() {
                Ok(outcome) => return Ok(outcome.map(drop)),
                Err(oneshot::error::TryRecvError::Empty) => {}
                Err(oneshot::error::TryRecvError::Closed) => return Err("the registration was lost".to_owned()),
            }
        }
    }

    /// Serves until the broker leaves.
    async fn serve(&mut self) -> Result<(), String> {
        let stop = self.shared.stop.clone();
        // Clones: the arms below borrow `self` mutably, and `notified` borrows from here.
        let shared = self.shared.clone();
        let mut ticks = interval(Duration::from_secs(1));
        let mut flush_at: Option<Instant> = None;
        loop {
            // `select!` evaluates the expression of a disabled arm as well, so it needs an instant.
            let flush = flush_at.unwrap_or_else(Instant::now);
            tokio::select! {
                message = self.stream.next() => self.on_message(message)?,
                request = self.requests.recv() => {
                    let Some(request) = request else { return Ok(()) };
                    self.on_request(request)?;
                }
                // The delay counts from the first ack, so that a steady flow of acks does not postpone it.
                () = shared.acks.arrived.notified(), if flush_at.is_none() => {
                    flush_at = Some(Instant::now() + ACK_DELAY);
                }
                () = sleep_until(flush), if flush_at.is_some() => {
                    flush_at = None;
                    self.flush_acks()?;
                }
                () = shared.hosted.changed.notified() => self.announce()?,
                _ = ticks.tick() => self.tick()?,
                () = self.outbox.broken() => return Err("the socket takes no frames any more".to_owned()),
                () = stop.cancelled() => return Ok(()),
            }
        }
    }

    async fn leave(mut self) {
        // Acks and requests that came before the goodbye.
        while let Ok(request) = self.requests.try_recv() {
            if self.on_request(request).is_err() {
                return;
            }
        }
        // In this order: acks after the goodbye have no effect.
        let goodbye = self.flush_acks().and_then(|()| self.send(None, &InboundFrame::Deregister));
        if goodbye.is_err() {
            return;
        }
        let close = CloseFrame { code: CloseCode::Normal, reason: "deregistered".into() };
        let ended = async {
            self.outbox.close(close).await;
            // Read to the end: the kernel resets a socket that is closed with unread bytes, and the goodbye may be
            // lost.
            while let Some(Ok(_)) = self.stream.next().await {}
        };
        if timeout(CLOSE_TIMEOUT, ended).await.is_err() {
            tracing::debug!("the engine has not answered the goodbye");
        }
    }

    fn on_message(
        &mut self,
        message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>,
    ) -> Result<(), String> {
        self.last_inbound = Instant::now();
        match message {
            None => Err("the engine has closed the connection".to_owned()),
            Some(Err(error)) => Err(format!("the connection broke: {error}")),
            Some(Ok(Message::Close(frame))) => Err(frame.map_or_else(
                || "the engine has closed the connection".to_owned(),
                |frame| format!("the engine has closed the connection: {} {}", u16::from(frame.code), frame.reason),
            )),
            Some(Ok(Message::Text(text))) => self.on_text(text.as_str()),
            // Pings are answered by the library.
            Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(()),
        }
    }

    fn on_request(&mut self, request: LinkRequest) -> Result<(), String> {
        match request {
            LinkRequest::Host(request) => {
                let frame = InboundFrame::AgentRegister(request.frame.clone());
                self.request(WaitingRequest::Host(request), &frame)
            }
            LinkRequest::Register(manifest, reply) => {
                let frame = InboundFrame::Register(Box::new(manifest.register()));
                self.request(WaitingRequest::Manifest(manifest, reply), &frame)
            }
            LinkRequest::Renew => {
                self.flush_acks()?;
                self.renewed_at = Some(Instant::now());
                self.send(None, &InboundFrame::Deregister)?;
                // An engine that keeps the socket open has the node again at once. Nobody waits for the answer.
                let manifest = self.shared.manifest.borrow().clone();
                let frame = InboundFrame::Register(Box::new(manifest.register()));
                self.request(WaitingRequest::Manifest(Box::new(manifest), oneshot::channel().0), &frame)
            }
            // Without an id the engine repeats the recording while its storage is unavailable; with one it reports an
            // error, and the result would have to be sent again from here.
            LinkRequest::Send(frame) if matches!(*frame, InboundFrame::ActionResult(_)) => self.send(None, &frame),
            LinkRequest::Send(frame) => {
                // Acks count only while the agent is served here.
                self.flush_acks()?;
                self.request(WaitingRequest::Logged("agent.deregister or action.accept"), &frame)
            }
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        let now = Instant::now();
        // The engine has neither closed the socket nor registered the node again: a new connection leads to a known
        // state.
        if self.renewed_at.is_some_and(|renewed_at| now.duration_since(renewed_at) >= CLOSE_TIMEOUT) {
            return Err("deregistered".to_owned());
        }
        if now.duration_since(self.last_inbound) >= SILENCE {
            return Err("no sign of life of the engine".to_owned());
        }
        if now.duration_since(self.last_heartbeat) >= HEARTBEAT_EVERY {
            self.send_heartbeat()?;
            self.outbox.post(Message::Ping(Vec::new().into()))?;
        }
        if now.duration_since(self.last_inventory) >= INVENTORY_EVERY {
            self.announce()?;
        }
        self.shared.waiting_replies.store(self.pending.len(), Ordering::Relaxed);
        let has_gap = self.shared.hosted.mailboxes().iter().any(|(_, mailbox)| mailbox.has_gap());
        match self.repeats.evaluate(now, has_gap, self.shared.has_room.load(Ordering::Relaxed)) {
            Some(reason) => Err(reason.to_owned()),
            None => Ok(()),
        }
    }

    pub(super) fn announce(&mut self) -> Result<(), String> {
        let inventory = InboundFrame::Inventory(Inventory { agents: self.shared.hosted.inventory() });
        self.request(WaitingRequest::Logged("inventory.sync"), &inventory)?;
        self.last_inventory = Instant::now();
        self.send_heartbeat()
    }

    fn send_heartbeat(&mut self) -> Result<(), String> {
        let heartbeat = self.shared.manifest.borrow().heartbeat(&self.shared.hosted.names());
        self.last_heartbeat = Instant::now();
        self.send(None, &InboundFrame::Heartbeat(Box::new(heartbeat)))
    }

    fn flush_acks(&mut self) -> Result<(), String> {
        // Acks that a failing socket loses are repeated by the next registration, which sends every position.
        let acks = self.shared.acks.take();
        acks.into_iter().try_for_each(|(name, position)| self.send_ack(&name, position))
    }

    pub(super) fn send_ack(&self, agent: &str, up_to_seq: u64) -> Result<(), String> {
        self.send(None, &InboundFrame::Ack(Ack { agent: agent.to_owned(), up_to_seq }))
    }

    pub(super) fn request(&mut self, waiting: WaitingRequest, frame: &InboundFrame) -> Result<(), String> {
        let id = self.pending.add(waiting);
        self.send(Some(&id), frame)
    }

    fn send(&self, id: Option<&str>, frame: &InboundFrame) -> Result<(), String> {
        self.outbox.send(id, frame)
    }
}
