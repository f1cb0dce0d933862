//! The end of a process: the first SIGTERM or SIGINT asks for it, 30 s later it is enforced.

use std::{io, time::Duration};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A process that has not ended this long after it was asked to is stopped hard.
const HARD_STOP_AFTER: Duration = Duration::from_secs(30);

/// Tells every task of the process when to drain. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    asked: CancellationToken,
}

impl Shutdown {
    /// Listens for SIGTERM and SIGINT from now on. A second signal, or 30 s without an end, exits the
    /// process with status 1.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    pub fn on_signals() -> io::Result<Self> {
        let shutdown = Self::default();
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let asked = shutdown.asked.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
                // The process decided by itself; the bound on its end is the same.
                () = asked.cancelled() => {}
            }
            tracing::info!("asked to stop: draining");
            asked.cancel();
            tokio::select! {
                _ = term.recv() => tracing::warn!("asked twice: stopping at once"),
                _ = int.recv() => tracing::warn!("asked twice: stopping at once"),
                () = tokio::time::sleep(HARD_STOP_AFTER) => tracing::error!("not drained in time: stopping hard"),
            }
            #[expect(clippy::disallowed_methods, reason = "this is the hard stop that the drain is bounded by")]
            std::process::exit(1);
        });
        Ok(shutdown)
    }

    /// Cancelled when the process is to end.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.asked.clone()
    }

    /// Whether the process is to end.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.asked.is_cancelled()
    }

    /// Asks for the end from inside.
    pub fn ask(&self) {
        self.asked.cancel();
    }

    /// Waits until the process is to end.
    pub async fn asked(&self) {
        self.asked.cancelled().await;
    }
}
