//! Address that follows the leader of a cluster: a proxy and health checks, as HAProxy with `httpchk GET /primary`.

use std::time::Duration;

use anyhow::Result;
use tokio::task::AbortHandle;

use super::member::Member;
use crate::http;
use crate::proxy::{self, TcpProxy};

const CHECK_INTERVAL: Duration = Duration::from_millis(250);
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Stable address of the leader. Without a leader it refuses connections.
#[derive(Debug)]
pub(super) struct Route {
    address: String,
    checks: AbortHandle,
}

/// Member as the checks see it.
struct Target {
    health: String,
    postgres: String,
}

impl Route {
    /// Starts to follow the leader of these members.
    pub(super) fn start(members: &[Member]) -> Result<Self> {
        let targets: Vec<Target> = members
            .iter()
            .map(|member| Target { health: member.rest_url("primary"), postgres: member.postgres_address() })
            .collect();
        let first = targets.first().map(|target| target.postgres.as_str()).unwrap_or_default();
        let proxy = TcpProxy::start(first)?;
        // Until the first check has found a leader: the first member may be a standby.
        proxy.cut();
        let address = proxy.address();
        let client = http::client().timeout(CHECK_TIMEOUT).build()?;
        let checks = proxy::runtime()?.spawn(follow_leader(proxy, client, targets)).abort_handle();
        Ok(Self { address, checks })
    }

    /// Returns the address, `host:port`.
    pub(super) fn address(&self) -> String {
        self.address.clone()
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        self.checks.abort();
    }
}

async fn follow_leader(proxy: TcpProxy, client: reqwest::Client, targets: Vec<Target>) {
    let mut current: Option<usize> = None;
    loop {
        let leader = find_leader(&client, &targets).await;
        if leader != current {
            match leader {
                // Switches before it accepts again, so that no client reaches the former leader.
                Some(number) if proxy.switch_to(&targets[number].postgres).is_ok() => proxy.restore(),
                Some(_) | None => proxy.cut(),
            }
            current = leader;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

async fn find_leader(client: &reqwest::Client, targets: &[Target]) -> Option<usize> {
    for (number, target) in targets.iter().enumerate() {
        if client.get(&target.health).send().await.is_ok_and(|answer| answer.status() == 200) {
            return Some(number);
        }
    }
    None
}
