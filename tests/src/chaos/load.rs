//! Concurrent senders that keep sending during faults.

use std::{
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use relay_testkit::client::{Agent, Api};
use tokio::task::JoinHandle;

use super::{
    random_below,
    sender::{ClientSend, SentMessage, Target, send_as_client, send_keyed},
};

/// Delay between two messages of one sender.
const PAUSE: Duration = Duration::from_millis(10);

/// Round-robin selection among the available gateways, as a load balancer would do.
#[derive(Clone, Debug)]
pub struct Front {
    gateways: Arc<RwLock<Vec<String>>>,
}

impl Front {
    /// Creates a front for these gateways.
    pub fn new(gateways: &[&str]) -> Self {
        Self { gateways: Arc::new(RwLock::new(gateways.iter().map(|url| (*url).to_owned()).collect())) }
    }

    pub fn add(&self, gateway: &str) {
        self.change(|gateways| gateways.push(gateway.to_owned()));
    }

    pub fn remove(&self, gateway: &str) {
        self.change(|gateways| gateways.retain(|url| url != gateway));
    }

    /// Returns the gateway for attempt `turn`.
    pub fn pick(&self, turn: usize) -> String {
        let gateways = self.gateways.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        gateways[turn % gateways.len()].clone()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<String>)) {
        change(&mut self.gateways.write().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

/// Running senders. They send direct messages to these agents until stopped.
#[derive(Debug)]
pub struct Senders {
    stopped: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<Result<Vec<ClientSend>>>>,
}

#[derive(Clone, Copy, Debug)]
enum Patience {
    Client,
    Outage,
}

/// Results of all senders.
#[derive(Debug, Default)]
pub struct SendReport {
    /// All sent messages.
    pub sent: Vec<SentMessage>,
    /// Number of 5xx answers, which were retried. Of persistent senders, of all repetitions.
    pub server_errors: u64,
    /// Number of connections that ended without an answer, which were retried.
    pub no_answers: u64,
}

impl Senders {
    /// Starts `count` senders with the token of this agent, which give up as published clients do.
    pub fn start(count: usize, as_agent: &Api, to: &[Agent], front: &Front) -> Self {
        Self::start_with(count, as_agent, to, front, Patience::Client)
    }

    /// Starts senders that repeat each request, with its idempotency key, through an outage.
    pub fn start_persistent(count: usize, as_agent: &Api, to: &[Agent], front: &Front) -> Self {
        Self::start_with(count, as_agent, to, front, Patience::Outage)
    }

    fn start_with(count: usize, as_agent: &Api, to: &[Agent], front: &Front, patience: Patience) -> Self {
        let (stopped, accepted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let names: Arc<[String]> = to.iter().map(|agent| agent.name.clone()).collect();
        let tasks = (0..count)
            .map(|number| {
                let (stopped, accepted, names) = (Arc::clone(&stopped), Arc::clone(&accepted), Arc::clone(&names));
                let (api, front) = (as_agent.clone(), front.clone());
                tokio::spawn(async move {
                    let mut sent = Vec::new();
                    while !stopped.load(Ordering::Relaxed) {
                        let text = format!("{number}-{}", sent.len());
                        let to = Target::Dm(names[random_below(names.len())].clone());
                        let first = number + sent.len();
                        let one = match patience {
                            Patience::Client => {
                                let gateways = (0..).map(|attempt| api.at(&front.pick(first + attempt)));
                                send_as_client(gateways, &to, &text).await?
                            }
                            Patience::Outage => {
                                let gateways = [api.at(&front.pick(first)), api.at(&front.pick(first + 1))];
                                let sent = send_keyed(&gateways, &to, &text).await?;
                                ClientSend { server_errors: u64::from(sent.attempts - 1), no_answers: 0, sent }
                            }
                        };
                        sent.push(one);
                        accepted.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(PAUSE).await;
                    }
                    Ok(sent)
                })
            })
            .collect();
        Self { stopped, accepted, tasks }
    }

    /// Returns the number of accepted messages so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Waits until `count` more messages are accepted. Fails as soon as a sender fails.
    pub async fn send(&self, count: u64) -> Result<()> {
        let (goal, since) = (self.accepted() + count, Instant::now());
        while self.accepted() < goal {
            anyhow::ensure!(!self.tasks.iter().any(JoinHandle::is_finished), "a sender has given up");
            anyhow::ensure!(since.elapsed() < Duration::from_secs(120), "{} of {goal} accepted", self.accepted());
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Stops the senders and returns their results. A message that a client would have given up is an error.
    pub async fn stop(self) -> Result<SendReport> {
        self.stopped.store(true, Ordering::Relaxed);
        let mut reported = SendReport::default();
        for task in self.tasks {
            for one in task.await.context("a sender panicked")?? {
                reported.sent.push(one.sent);
                reported.server_errors += one.server_errors;
                reported.no_answers += one.no_answers;
            }
        }
        Ok(reported)
    }
}
