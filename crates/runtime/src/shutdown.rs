//! Graceful shutdown: the first SIGTERM or SIGINT requests it, 30 s later the process is stopped hard.

use std::{io, time::Duration};

use relay_tasks::spawn_isolated;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Time after the request at which the process is stopped hard.
const HARD_STOP_AFTER: Duration = Duration::from_secs(30);

/// Shutdown request, shared by every task of the process. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    requested: CancellationToken,
}

impl Shutdown {
    /// Listens for SIGTERM and SIGINT. A second signal, or 30 s without an end, exits the process with status 1.
    ///
    /// # Errors
    /// If the signal handlers cannot be installed.
    pub fn on_signals() -> io::Result<Self> {
        let shutdown = Self::default();
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let requested = shutdown.requested.clone();
        spawn_isolated("shutdown", async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
                // The process requested its own shutdown; the same time limit applies.
                () = requested.cancelled() => {}
            }
            tracing::info!("shutdown requested, draining");
            requested.cancel();
            tokio::select! {
                _ = term.recv() => tracing::warn!("second shutdown request, stopping at once"),
                _ = int.recv() => tracing::warn!("second shutdown request, stopping at once"),
                () = tokio::time::sleep(HARD_STOP_AFTER) => tracing::error!("not drained in time, stopping hard"),
            }
            #[expect(clippy::disallowed_methods, reason = "the hard stop bounds the drain")]
            std::process::exit(1);
        });
        Ok(shutdown)
    }

    /// Returns a token that is cancelled when shutdown is requested.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.requested.clone()
    }

    /// Returns whether shutdown is requested.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.requested.is_cancelled()
    }

    /// Requests shutdown from inside the process.
    pub fn request(&self) {
        self.requested.cancel();
    }

    /// Waits until shutdown is requested.
    pub async fn wait_requested(&self) {
        self.requested.cancelled().await;
    }
}
