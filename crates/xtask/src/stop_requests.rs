//! [`StopRequests`]: the signals by which a person ends a command that stays up.

use std::time::Duration;

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C and SIGTERM.
pub(crate) struct StopRequests {
    interrupt: Signal,
    terminate: Signal,
}

impl StopRequests {
    pub(crate) fn listen() -> Result<Self> {
        let (interrupt, terminate) = (SignalKind::interrupt(), SignalKind::terminate());
        Ok(Self { interrupt: signal(interrupt)?, terminate: signal(terminate)? })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// A second request. One that comes within a second is the first: some senders signal the process and its
    /// group.
    pub(crate) async fn again() -> Result<()> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Self::listen()?.next().await;
        Ok(())
    }
}
