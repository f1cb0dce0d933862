//! Posts that are timed while a fault lasts, none of which may be refused.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use relay_testkit::client::Api;
use tokio::task::JoinHandle;

use super::sender::{Outcome, SentMessage, Target, send_once};

const PAUSE: Duration = Duration::from_millis(10);
/// Longest time that a post may take while a server fails, on a loaded machine.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Messages that are posted one after another, with the time that each post took.
#[derive(Debug)]
pub struct Posts {
    made: Arc<Mutex<Vec<(SentMessage, Duration)>>>,
    stopped: Arc<AtomicBool>,
    task: JoinHandle<Result<()>>,
}

impl Posts {
    /// Starts to post to these agents in turn, at these gateways in turn, each message once.
    pub fn start(apis: Vec<Api>, agents: &'static [&'static str]) -> Self {
        let (made, stopped) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicBool>::default());
        let (log, ends) = (Arc::clone(&made), Arc::clone(&stopped));
        let task = tokio::spawn(async move {
            let mut number = 0;
            while !ends.load(Ordering::Relaxed) {
                number += 1;
                let (api, to) = (&apis[number % apis.len()], agents[number / apis.len() % agents.len()]);
                let began = Instant::now();
                let sent = send_once(api, &Target::Dm(to.to_owned()), &format!("message {number}")).await?;
                log.lock().unwrap_or_else(PoisonError::into_inner).push((sent, began.elapsed()));
                tokio::time::sleep(PAUSE).await;
            }
            Ok(())
        });
        Self { made, stopped, task }
    }

    /// Returns the number of posts so far.
    pub fn count(&self) -> usize {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Describes the posts since the `first` one. Fails if one was refused or they took long.
    pub fn report(&self, fault: &str, first: usize) -> Result<String> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let mut times: Vec<Duration> = made[first..].iter().map(|(_, time)| *time).collect();
        times.sort_unstable();
        let refused = made[first..].iter().filter(|(sent, _)| !matches!(sent.outcome, Outcome::Accepted(_))).count();
        let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        ensure!(refused == 0, "{refused} posts were refused: {fault}");
        ensure!(p99 < ANSWERED_WITHIN, "p99 {p99:?}: {fault}");
        Ok(format!("{fault}: {} posts, p50 {p50:?}, p99 {p99:?}", times.len()))
    }

    /// Returns the longest time that a post has taken.
    pub fn longest(&self) -> Duration {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.iter().map(|(_, time)| *time).max().unwrap_or_default()
    }

    /// Stops posting and returns all messages.
    pub async fn stop(self) -> Result<Vec<SentMessage>> {
        self.stopped.store(true, Ordering::Relaxed);
        self.task.await??;
        let made = std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(made.into_iter().map(|(sent, _)| sent).collect())
    }
}
