//! Limits of connections: how many a client, a token, a family of workspaces and the gateway may have, and how slow
//! they may be.
//!
//! [`Connections`] counts. `main` asks it about each TCP connection, [`admit_request`] about the addresses behind
//! trusted proxies, `caller` about requests in progress, and the upgrades of nodes and observers about their sockets.

mod bodies;
mod client_address;
mod limits;
mod permits;

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    extract::{FromRequestParts, MatchedPath, Request},
    http::request::Parts,
    response::Response,
};
use bodies::{BodyOwner, VALUE_FACTOR};
pub(crate) use bodies::{FrameMemory, RequestBodies};
pub use client_address::{ClientAddress, PeerAddress};
use ipnet::IpNet;
pub use limits::ConnectionLimits;
pub use permits::{CallerPermit, CallerPermits, Limit};
use permits::{KeyedPermit, KeyedPermits};
use relay_domain::{
    WorkspaceScope, access::client_network::client_network, metric_names as name, workspaces::family::FamilyId,
};
use relay_engine::access::limits::RateLimitSubject;
use relay_runtime::server::GuardedBody;
use relay_tasks::byte_budget::ByteLease;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{error::ApiError, state::AppState};

/// Connections above a limit that are answered with a refusal at the same time; further ones are closed.
const MAX_REFUSALS: usize = 256;
/// Observers of this gateway, and of one family: each costs a share of every event.
const MAX_OBSERVERS: usize = 8192;
const MAX_FAMILY_OBSERVERS: usize = MAX_OBSERVERS / 4;

/// Routes whose handlers keep the JSON of the body as text. Others may hold it as values, which take more.
const ROUTES_WITH_TEXT: [&str; 8] = [
    "/v1/channels/{name}/messages",
    "/v1/messages/{id}",
    "/v1/messages/{id}/replies",
    "/v1/messages/batch",
    "/v1/dm",
    "/v1/dm/group",
    "/v1/dm/{id}/messages",
    "/v1/to/{address}",
];

/// Counts of this gateway's connections. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Connections {
    trusted_proxies: Arc<[IpNet]>,
    /// TCP connections of all clients.
    total: KeyedPermits<()>,
    /// TCP connections of an address, and behind a trusted proxy its requests in progress and its sockets.
    addresses: KeyedPermits<IpAddr>,
    refusals: Arc<Semaphore>,
    /// Requests in progress.
    pub(crate) requests: CallerPermits,
    /// Memory of their bodies, and of large frames.
    pub(crate) bodies: RequestBodies,
    /// Sockets of nodes.
    pub(crate) nodes: CallerPermits,
    /// Sockets and streams of observers.
    pub(crate) observers: CallerPermits,
    /// Time that a node has to register after the upgrade.
    pub(crate) registration_timeout: Duration,
}

/// Admission of a TCP connection.
#[derive(Debug)]
pub enum Admission {
    Admitted(Admitted),
    /// Its requests are refused because of this limit.
    Refused(Limit, OwnedSemaphorePermit),
}

/// Permits of an open TCP connection.
#[derive(Debug)]
pub struct Admitted {
    _total: KeyedPermit<()>,
    _address: Option<KeyedPermit<IpAddr>>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        metrics::gauge!(name::CONNECTIONS).decrement(1);
    }
}

impl Connections {
    /// Creates the counts. `max_connections` may be lower than the setting, because files are scarce.
    #[must_use]
    pub fn new(limits: &ConnectionLimits, trusted_proxies: Vec<IpNet>) -> Self {
        let total = limits.max_connections;
        let (workspace, token) = (limits.max_connections_per_workspace, limits.max_connections_per_token);
        Self {
            trusted_proxies: trusted_proxies.into(),
            total: KeyedPermits::new(total),
            addresses: KeyedPermits::new(limits.max_connections_per_address),
            refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
            requests: CallerPermits::new(total, workspace, token),
            bodies: RequestBodies::default(),
            nodes: CallerPermits::new(total, workspace, token),
            observers: CallerPermits::new(MAX_OBSERVERS, workspace.min(MAX_FAMILY_OBSERVERS), token),
            registration_timeout: Duration::from_secs(limits.registration_timeout_seconds),
        }
    }

    /// Admits a new connection, or says why its requests are refused. `None` if it is to be closed at once.
    #[must_use]
    pub fn admit(&self, peer: SocketAddr) -> Option<Admission> {
        let address = peer.ip().to_canonical();
        // A trusted proxy carries the connections of many clients.
        let address =
            if self.is_exempt(address) { None } else { Some(self.addresses.try_acquire(client_network(address))) };
        let (refused, address) = match address {
            Some(None) => (Some(Limit::Address), None),
            address => (None, address.flatten()),
        };
        // After the address: a client above its own limit takes nothing of the limit that all share.
        let permit = if refused.is_none() { self.total.try_acquire(()) } else { None };
        if let Some(permit) = permit {
            metrics::gauge!(name::CONNECTIONS).increment(1);
            return Some(Admission::Admitted(Admitted { _total: permit, _address: address }));
        }
        let limit = refused.unwrap_or(Limit::Process);
        limit.count_refusal();
        let permit = Arc::clone(&self.refusals).try_acquire_owned().ok()?;
        Some(Admission::Refused(limit, permit))
    }

    /// Acquires a permit for a client behind a trusted proxy. Other clients have one by their TCP connection.
    fn admit_forwarded(&self, client: ClientAddress) -> Result<Option<KeyedPermit<IpAddr>>, Limit> {
        match client {
            ClientAddress::Forwarded(address) if !self.is_exempt(address) => {
                self.addresses.try_acquire(client_network(address)).map(Some).ok_or(Limit::Address)
            }
            ClientAddress::Forwarded(_) | ClientAddress::Peer(_) | ClientAddress::Unknown => Ok(None),
        }
    }

    /// Returns whether connections of an address are not counted: those of this machine and of trusted proxies.
    fn is_exempt(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.trusted_proxies.iter().any(|network| network.contains(&address))
    }
}

/// Permits that a request holds until its answer. A socket that it opens takes them over.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionPermits(Arc<PermitSet>);

#[derive(Debug, Default)]
struct PermitSet {
    address: Option<KeyedPermit<IpAddr>>,
    caller: OnceLock<CallerPermit>,
    bodies: RequestBodies,
    body: OnceLock<ByteLease>,
}

impl ConnectionPermits {
    /// Acquires a permit for the request of an authenticated caller.
    pub(crate) fn acquire_request(
        parts: &Parts,
        state: &AppState,
        (family, scope): (FamilyId, WorkspaceScope),
        caller: RateLimitSubject,
    ) -> Result<(), ApiError> {
        // The middleware adds them to each request; only a handler that is called without it has none.
        let Some(held) = parts.extensions.get::<Self>() else { return Ok(()) };
        let permit =
            state.connections.requests.try_acquire(family, scope, caller).map_err(ApiError::too_many_connections)?;
        // The first permit of a request stays; a second one is returned at once.
        let _ = held.0.caller.set(permit);
        Ok(())
    }

    /// Keeps the permit of the client's address until the answer is sent.
    pub(crate) fn hold_until_sent(self, response: Response) -> Response {
        // Other clients are counted by their TCP connections, so their bodies need no wrapper.
        if self.0.address.is_some() { response.map(|body| GuardedBody::wrap(body, self)) } else { response }
    }

    /// Waits for the memory of the request's body, which the caller's family holds until the answer.
    pub(crate) async fn reserve_body(parts: &Parts, bytes: usize) -> Result<BodyMemory, ApiError> {
        let held = parts.extensions.get::<Self>().cloned().unwrap_or_default();
        let owner = match held.0.caller.get() {
            Some(permit) => BodyOwner::Family(permit.family()),
            None => BodyOwner::Address(ClientAddress::of_parts(parts).ip()),
        };
        let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
        let factor = memory_factor(route);
        let reserved = held.0.bodies.reserve(owner, bytes.saturating_mul(factor)).await;
        let lease = reserved.ok_or_else(ApiError::too_many_bodies)?;
        Ok(BodyMemory { held, lease, factor })
    }
}

/// Returns the memory of a byte of a body once its handler has parsed it.
fn memory_factor(route: &str) -> usize {
    if ROUTES_WITH_TEXT.contains(&route) { 1 } else { VALUE_FACTOR }
}

/// Memory of a body that is being read.
pub(crate) struct BodyMemory {
    held: ConnectionPermits,
    lease: ByteLease,
    /// Memory of a byte of the body once it is parsed.
    factor: usize,
}

impl BodyMemory {
    /// Keeps the memory of a body of this size until the answer.
    pub(crate) fn keep(mut self, bytes: usize) {
        self.lease.shrink_to(bytes.saturating_mul(self.factor));
        let _ = self.held.0.body.set(self.lease);
    }
}

/// Client of a request. While this is kept, the client's address has one connection less.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) address: ClientAddress,
    _permits: ConnectionPermits,
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let permits = parts.extensions.get::<ConnectionPermits>().cloned().unwrap_or_default();
        Ok(Self { address: ClientAddress::of_parts(parts), _permits: permits })
    }
}

/// Determines the client's address, and acquires its permit for the request.
///
/// # Errors
/// 503 `too_many_connections`: the address has too many connections.
pub(crate) fn admit_request(state: &AppState, request: &mut Request) -> Result<ConnectionPermits, ApiError> {
    let client = ClientAddress::of_request(request, &state.connections.trusted_proxies);
    request.extensions_mut().insert(client);
    let address = state.connections.admit_forwarded(client).map_err(|limit| {
        limit.count_refusal();
        ApiError::too_many_connections(limit)
    })?;
    let bodies = state.connections.bodies.clone();
    let held =
        ConnectionPermits(Arc::new(PermitSet { address, bodies, caller: OnceLock::new(), body: OnceLock::new() }));
    request.extensions_mut().insert(held.clone());
    Ok(held)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Settings {
        #[command(flatten)]
        limits: ConnectionLimits,
    }

    fn connections(arguments: &[&str]) -> Connections {
        let settings = Settings::parse_from([&["test"], arguments].concat());
        Connections::new(&settings.limits, vec!["10.0.0.0/8".parse().unwrap()])
    }

    fn admit(connections: &Connections, address: &str) -> Result<Admission, Limit> {
        match connections.admit(SocketAddr::new(address.parse().unwrap(), 1)) {
            Some(Admission::Refused(limit, _)) => Err(limit),
            Some(admitted) => Ok(admitted),
            None => panic!("closed without an answer"),
        }
    }

    #[test]
    fn bodies_that_become_values_take_more_memory_than_texts() {
        assert_eq!(memory_factor("/v1/dm"), 1);
        let with_values = ["/v1/actions/{name}/invoke", "/v1/agents/spawn", "/v1/hooks/{id}", "a later route"];
        assert_eq!(with_values.map(memory_factor), [VALUE_FACTOR; 4]);
        let router = include_str!("../router.rs");
        for route in ROUTES_WITH_TEXT {
            assert!(router.contains(&format!("\"{route}\"")), "{route}");
        }
    }

    #[test]
    fn an_address_has_a_share_of_the_connections() {
        let connections = connections(&["--max-connections-per-address", "2"]);
        let held: Vec<_> = (0..2).map(|_| admit(&connections, "2001:db8::1").unwrap()).collect();
        assert_eq!(admit(&connections, "2001:db8::2").unwrap_err(), Limit::Address, "of the same /64");
        admit(&connections, "2001:db8:0:1::2").unwrap();
        for exempt in ["127.0.0.1", "10.1.2.3"] {
            let _held: Vec<_> = (0..3).map(|_| admit(&connections, exempt).unwrap()).collect();
        }
        drop(held);
        admit(&connections, "2001:db8::2").unwrap();
    }

    #[test]
    fn a_full_gateway_refuses_all_clients_and_holds_no_permit_of_the_refused() {
        let connections = connections(&["--max-connections", "1", "--max-connections-per-address", "1"]);
        let held = admit(&connections, "127.0.0.1").unwrap();
        for _ in 0..2 {
            assert_eq!(admit(&connections, "192.0.2.1").unwrap_err(), Limit::Process);
        }
        drop(held);
        admit(&connections, "192.0.2.1").unwrap();
    }
}
