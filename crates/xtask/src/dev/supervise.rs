//! Restarts children that die and keeps `dev.json` true.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::dev_file::DevFile;

const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A child that lived this long starts with a fresh delay.
const STABLE_AFTER: Duration = Duration::from_secs(30);
const LONGEST_DELAY: Duration = Duration::from_secs(10);

/// Watches every child until the returned set is dropped.
pub(super) fn keep_alive(cluster: &Arc<Cluster>, dev_file: &DevFile, workspace_key: &str) -> JoinSet<()> {
    let mut watchers = JoinSet::new();
    let children = (0..cluster.services().count()).map(Child::Service).chain([Child::Postgres, Child::Nats]);
    for child in children {
        let watcher = Watcher {
            child,
            cluster: Arc::clone(cluster),
            dev_file: dev_file.clone(),
            workspace_key: workspace_key.to_owned(),
        };
        watchers.spawn(watcher.run());
    }
    watchers
}

enum Child {
    Service(usize),
    Postgres,
    Nats,
}

struct Watcher {
    child: Child,
    cluster: Arc<Cluster>,
    dev_file: DevFile,
    workspace_key: String,
}

impl Watcher {
    async fn run(self) {
        let mut delay = Duration::ZERO;
        let mut started = Instant::now();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if self.is_running() {
                continue;
            }
            if started.elapsed() > STABLE_AFTER {
                delay = Duration::ZERO;
            }
            println!("[dev] {} ended, starting it again", self.name());
            tokio::time::sleep(delay).await;
            delay = (delay * 2).clamp(Duration::from_millis(250), LONGEST_DELAY);
            started = Instant::now();
            let outcome = self.restart().await;
            // A child that never became ready may have a new pid all the same.
            let written = self.dev_file.write(&self.cluster, &self.workspace_key);
            for error in [outcome, written].into_iter().filter_map(Result::err) {
                eprintln!("[dev] {}: {error:#}", self.name());
            }
        }
    }

    fn name(&self) -> &str {
        match self.child {
            Child::Service(index) => self.cluster.services().nth(index).map_or("", |service| service.name()),
            Child::Postgres => "postgres",
            Child::Nats => "nats",
        }
    }

    fn is_running(&self) -> bool {
        match self.child {
            Child::Service(index) => self.cluster.services().nth(index).is_none_or(|service| service.is_running()),
            // Servers that the environment named are not ours to watch.
            Child::Postgres => self.cluster.backends.postgres.as_ref().is_none_or(|it| it.is_running()),
            Child::Nats => self.cluster.backends.nats.as_ref().is_none_or(|it| it.is_running()),
        }
    }

    async fn restart(&self) -> Result<()> {
        match self.child {
            // Readiness may need a server that is being restarted too, so it is not waited for.
            Child::Service(index) => match self.cluster.services().nth(index) {
                Some(service) => service.start_again(),
                None => Ok(()),
            },
            Child::Postgres => match &self.cluster.backends.postgres {
                Some(postgres) => postgres.restart().await,
                None => Ok(()),
            },
            Child::Nats => match &self.cluster.backends.nats {
                Some(nats) => nats.restart().await,
                None => Ok(()),
            },
        }
    }
}
