//! Pool of idle connections. Each is stored under its checked address, so that an attempt reuses one only after its own
//! lookup has found and approved the same address.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use tokio::{task::JoinSet, time::Instant};

/// Maximum idle time of a connection. Common servers close theirs after 5 s, and a request that crosses with the close
/// fails.
const IDLE_FOR: Duration = Duration::from_secs(4);
/// Maximum number of idle connections per key.
const MAX_IDLE_PER_KEY: usize = 16;
/// Maximum number of idle connections in total.
const MAX_IDLE: usize = 2048;
/// Interval of the search for expired connections.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Reusable HTTP connection.
pub(crate) type Connection = SendRequest<Full<Bytes>>;

/// Destination of a connection and verified identity of the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    pub(crate) is_https: bool,
    pub(crate) host: String,
    pub(crate) address: SocketAddr,
}

#[derive(Default)]
pub(crate) struct Pool {
    idle: Mutex<Idle>,
    /// Drivers of the connections, and the sweep.
    tasks: Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct Idle {
    places: HashMap<PoolKey, Vec<(Connection, Instant)>>,
    count: usize,
    is_swept: bool,
}

impl Pool {
    /// Starts a task that ends with the pool at the latest.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        // The set keeps tasks that have ended until they are joined.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Takes the most recently used connection with this key.
    pub(crate) fn take(&self, place: &PoolKey) -> Option<Connection> {
        let mut idle = self.lock();
        let connections = idle.places.get_mut(place)?;
        let taken = connections.pop();
        if connections.is_empty() {
            idle.places.remove(place);
        }
        let (connection, since) = taken?;
        idle.count -= 1;
        // If the newest one has expired, all others have.
        (since.elapsed() < IDLE_FOR && !connection.is_closed()).then_some(connection)
    }

    /// Stores a connection, or closes it when the pool is full.
    pub(crate) fn keep(self: &Arc<Self>, place: PoolKey, connection: Connection) {
        let mut idle = self.lock();
        if connection.is_closed() || idle.count >= MAX_IDLE {
            return;
        }
        let connections = idle.places.entry(place).or_default();
        if connections.len() >= MAX_IDLE_PER_KEY {
            return;
        }
        connections.push((connection, Instant::now()));
        idle.count += 1;
        // Under the lock that the sweep ends with (`close_old`): no connection is kept without a sweep.
        if !std::mem::replace(&mut idle.is_swept, true) {
            self.spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Closes expired connections. Returns whether any connection is left.
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

/// Closes expired connections periodically until the pool is empty.
// A weak reference: a sweep that sleeps does not keep a dropped pool and its connections.
async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        if !pool.upgrade().is_some_and(|pool| pool.close_old()) {
            return;
        }
    }
}
