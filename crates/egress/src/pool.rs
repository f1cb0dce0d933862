//! Idle connections. Each is kept under the address that was judged when it was opened, so that an attempt takes
//! one over only if its own look at the host has found, and approved, the same address.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;

/// How long an idle connection is kept. Common servers close theirs after 5 s, and a request that crosses with
/// the close fails for nothing.
const IDLE_FOR: Duration = Duration::from_secs(4);
/// Idle connections to one place.
const MOST_TO_ONE: usize = 16;
/// Idle connections altogether.
const MOST: usize = 2048;
/// How often idle ones are looked through.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// A connection that takes requests.
pub(crate) type Connection = SendRequest<Full<Bytes>>;

/// Where a connection leads, and as whom the other side was verified.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) is_https: bool,
    pub(crate) host: String,
    pub(crate) address: SocketAddr,
}

#[derive(Default)]
pub(crate) struct Pool {
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    places: HashMap<Place, Vec<(Connection, Instant)>>,
    count: usize,
    is_swept: bool,
}

impl Pool {
    /// The connection to this place that became idle last.
    pub(crate) fn take(&self, place: &Place) -> Option<Connection> {
        let mut idle = self.lock();
        let connections = idle.places.get_mut(place)?;
        let taken = connections.pop();
        if connections.is_empty() {
            idle.places.remove(place);
        }
        let (connection, since) = taken?;
        idle.count -= 1;
        (since.elapsed() < IDLE_FOR && !connection.is_closed()).then_some(connection)
    }

    /// Keeps a connection, or closes it where there are enough.
    pub(crate) fn keep(self: &Arc<Self>, place: Place, connection: Connection) {
        let mut idle = self.lock();
        if connection.is_closed() || idle.count >= MOST {
            return;
        }
        let connections = idle.places.entry(place).or_default();
        if connections.len() >= MOST_TO_ONE {
            return;
        }
        connections.push((connection, Instant::now()));
        idle.count += 1;
        if !std::mem::replace(&mut idle.is_swept, true) {
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Closes what has been idle for too long. Returns whether anything is left.
    fn close_old(&self) -> bool {
        let mut idle = self.lock();
        idle.places.retain(|_, connections| {
            connections.retain(|(connection, since)| since.elapsed() < IDLE_FOR && !connection.is_closed());
            !connections.is_empty()
        });
        idle.count = idle.places.values().map(Vec::len).sum();
        idle.is_swept = idle.count > 0;
        idle.is_swept
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs while anything is idle.
async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        if !pool.upgrade().is_some_and(|pool| pool.close_old()) {
            return;
        }
    }
}
