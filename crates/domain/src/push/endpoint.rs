//! Health of the endpoints of http_push nodes, shared by all workers. Main type: [`EndpointHealth`], the state of the
//! circuit breaker.

use chrono::{DateTime, Utc};

use super::BREAKER_FAILURES;
use crate::{NodeId, WorkspaceScope};

/// Health of an endpoint, from the reports of all workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndpointHealth {
    /// Consecutive failures.
    pub failures: i32,
    /// End of the circuit breaker's open period: no attempt before.
    pub open_until: Option<DateTime<Utc>>,
    /// End of the pause that the endpoint asked for.
    pub paused_until: Option<DateTime<Utc>>,
}

/// Result of a worker's recent attempts at one endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointReport {
    /// Workspace of the node.
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    /// Failures since the last success.
    pub failures: i32,
    /// `true` if an attempt succeeded; [`Self::failures`] came after it.
    pub succeeded: bool,
    /// End of the pause that the endpoint asked for.
    pub paused_until: Option<DateTime<Utc>>,
}

impl EndpointHealth {
    /// Returns the end of the pause or of the breaker's open period; `None` when a call is allowed, be it as the probe
    /// of an open breaker.
    #[must_use]
    pub fn closed_until(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let open = self.open_until.filter(|_| self.failures >= BREAKER_FAILURES);
        [self.paused_until, open].into_iter().flatten().find(|until| *until > now)
    }

    /// Returns whether the breaker is open, so that a call after its open period must be the only one: the probe.
    #[must_use]
    pub const fn needs_probe(&self) -> bool {
        self.failures >= BREAKER_FAILURES && self.open_until.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_wait_for_the_pause_and_for_the_open_breaker() {
        let at = |seconds| DateTime::from_timestamp(seconds, 0);
        let health = |failures, open, paused| EndpointHealth { failures, open_until: open, paused_until: paused };
        let now = at(100).unwrap();
        for (health, until, probe) in [
            (health(0, None, None), None, false),
            (health(BREAKER_FAILURES, at(130), None), at(130), true),
            (health(BREAKER_FAILURES, at(99), None), None, true),
            (health(BREAKER_FAILURES - 1, at(130), None), None, false),
            (health(0, None, at(101)), at(101), false),
            (health(0, None, at(100)), None, false),
            (health(BREAKER_FAILURES, at(130), at(90)), at(130), true),
        ] {
            assert_eq!((health.closed_until(now), health.needs_probe()), (until, probe), "{health:?}");
        }
    }
}
