//! Resolver of host names, shared fairly by tenants. Main type: [`SystemResolver`].
//!
//! A lookup ends with its call, so that names whose servers never answer hold nothing. A tenant with many of them takes
//! its own share of the lookups.

use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use hickory_resolver::{
    TokioResolver,
    config::{LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts},
    net::{NetError, runtime::TokioRuntimeProvider},
};
use moka::sync::Cache;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// Maximum number of concurrent lookups.
const MAX_LOOKUPS: usize = 128;
/// Maximum number of those of one tenant.
const MAX_PER_TENANT: usize = MAX_LOOKUPS / 16;
/// Maximum time that a lookup waits for its turn.
const LOOKUP_WAIT: Duration = Duration::from_secs(3);
/// Maximum time of a lookup. A call has 10 s in all.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses are kept as long as the DNS says, but no longer: some records say a day.
const MAX_TTL: Duration = Duration::from_secs(60);
/// A failed name is not looked up again for this long. Shorter than the shortest pause before another attempt of a
/// delivery, so that no attempt fails because of the one before.
const FAILURE_TTL: Duration = Duration::from_millis(900);
/// Bound of the failed names that are remembered.
const MAX_FAILURES: u64 = 10_000;
/// Tenants without lookups are forgotten when so many are remembered.
const MAX_TENANTS: usize = 1024;

/// Tenant on whose behalf a host is called. Lookups are shared fairly between tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Tenant(pub i64);

/// Resolver of host names.
pub trait Resolve: Send + Sync + 'static {
    /// Resolves all addresses of `host`, which is a name.
    fn resolve(&self, tenant: Tenant, host: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// Resolver with the name servers and the hosts file of the machine. Clones share the limits of concurrent lookups.
#[derive(Clone)]
pub struct SystemResolver {
    resolver: TokioResolver,
    turns: Arc<Turns>,
    failures: Cache<String, io::ErrorKind>,
}

impl SystemResolver {
    /// Creates a resolver that asks these name servers, or those of the machine if there are none. Reads `/etc/hosts`,
    /// and `/etc/resolv.conf` in the latter case.
    #[must_use]
    pub fn new(name_servers: &[SocketAddr]) -> Self {
        let failures = Cache::builder().max_capacity(MAX_FAILURES).time_to_live(FAILURE_TTL).build();
        Self { resolver: dns_resolver(name_servers), turns: Arc::default(), failures }
    }
}

impl Resolve for SystemResolver {
    async fn resolve(&self, tenant: Tenant, host: &str) -> io::Result<Vec<IpAddr>> {
        let check_failure = || -> io::Result<()> { self.failures.get(host).map_or(Ok(()), |kind| Err(kind.into())) };
        check_failure()?;
        let _turn = self.turns.take(tenant).await?;
        // Others may have found out during the wait.
        check_failure()?;
        // The trailing dot disables the search domains of this machine. Names of this machine are not in the DNS, and
        // their addresses need an allow rule anyway.
        let name = if host.contains('.') { format!("{host}.") } else { host.to_owned() };
        let found = match timeout(LOOKUP_TIMEOUT, self.resolver.lookup_ip(name)).await {
            Ok(Ok(found)) => return Ok(alternate_versions(found.iter().collect())),
            Ok(Err(error)) => lookup_error(error),
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        // A busy resolver says nothing about the name, so this failure is not remembered.
        if found.kind() != io::ErrorKind::ResourceBusy {
            self.failures.insert(host.to_owned(), found.kind());
        }
        Err(found)
    }
}

/// Creates the resolver, without waiting: it asks nothing yet.
fn dns_resolver(name_servers: &[SocketAddr]) -> TokioResolver {
    let provider = TokioRuntimeProvider::default;
    let own = |servers: &[SocketAddr]| {
        let servers = servers.iter().map(|address| {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            // The constructor sets the default port.
            server.connections.iter_mut().for_each(|connection| connection.port = address.port());
            server
        });
        let config = ResolverConfig::from_parts(None, Vec::new(), servers.collect());
        TokioResolver::builder_with_config(config, provider())
    };
    let mut builder = if name_servers.is_empty() {
        // Without a readable configuration, the server of this machine is asked, as resolv.conf(5) says.
        TokioResolver::builder(provider()).unwrap_or_else(|_| own(&[SocketAddr::from((Ipv4Addr::LOCALHOST, 53))]))
    } else {
        own(name_servers)
    };
    let options: &mut ResolverOpts = builder.options_mut();
    // Both versions: a host is judged by all its addresses, and can be reached over either.
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.positive_max_ttl = Some(MAX_TTL);
    options.negative_max_ttl = Some(FAILURE_TTL);
    builder.build().expect("only TLS configurations can be invalid")
}

/// Sorts addresses so that both versions are among the few that are tried.
fn alternate_versions(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    let (v4, v6): (Vec<_>, Vec<_>) = addresses.into_iter().partition(IpAddr::is_ipv4);
    let pairs = v4.len().min(v6.len());
    let (v4_rest, v6_rest) = (v4[pairs..].to_vec(), v6[pairs..].to_vec());
    v4.into_iter().zip(v6).flat_map(|(v4, v6)| [v4, v6]).chain(v4_rest).chain(v6_rest).collect()
}

fn lookup_error(error: NetError) -> io::Error {
    let kind = if matches!(error, NetError::Timeout) {
        io::ErrorKind::TimedOut
    } else if matches!(error, NetError::Busy) {
        io::ErrorKind::ResourceBusy
    } else if error.is_no_records_found() {
        io::ErrorKind::NotFound
    } else {
        io::ErrorKind::Other
    };
    io::Error::new(kind, error)
}

/// Turns of lookups: some for each tenant, and some in all.
struct Turns {
    all: Arc<Semaphore>,
    tenants: Mutex<HashMap<Tenant, Weak<Semaphore>>>,
    wait: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(MAX_LOOKUPS)), tenants: Mutex::default(), wait: LOOKUP_WAIT }
    }
}

impl Turns {
    /// Waits for a turn, which lasts until the permits are dropped.
    ///
    /// Fails with [`io::ErrorKind::ResourceBusy`] when there is none in time; the called host is then not at fault.
    async fn take(&self, tenant: Tenant) -> io::Result<[OwnedSemaphorePermit; 2]> {
        let (own, all) = (self.share(tenant), Arc::clone(&self.all));
        // Its own first: a tenant at its limit holds nothing of the others.
        let turn = async { Some([own.acquire_owned().await.ok()?, all.acquire_owned().await.ok()?]) };
        // The semaphores are never closed, so only the timeout yields none.
        let turn = timeout(self.wait, turn).await.ok().flatten();
        turn.ok_or_else(|| io::Error::new(io::ErrorKind::ResourceBusy, "the name server is busy"))
    }

    /// Returns the share of a tenant. It exists as long as a lookup holds or awaits a part of it.
    fn share(&self, tenant: Tenant) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = tenants.get(&tenant).and_then(Weak::upgrade) {
            return share;
        }
        if tenants.len() >= MAX_TENANTS {
            tenants.retain(|_, share| share.strong_count() > 0);
        }
        let share = Arc::new(Semaphore::new(MAX_PER_TENANT));
        tenants.insert(tenant, Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tenant_takes_its_share_and_leaves_the_others() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for _ in 0..MAX_PER_TENANT {
            held.push(turns.take(Tenant(1)).await.unwrap());
        }
        assert_eq!(turns.take(Tenant(1)).await.unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        let other = turns.take(Tenant(2)).await.unwrap();
        for tenant in 3..18 {
            for _ in 0..MAX_PER_TENANT {
                held.extend(turns.take(Tenant(tenant)).await);
            }
        }
        assert_eq!(held.len(), MAX_LOOKUPS - 1, "the limit of all");
        assert_eq!(turns.take(Tenant(2)).await.unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(other);
        held.push(turns.take(Tenant(2)).await.unwrap());
        drop(held.remove(0));
        assert!(turns.take(Tenant(1)).await.is_ok(), "a turn ends with its lookup");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_without_a_turn_is_no_failure_of_its_name() {
        let resolver = SystemResolver::new(&[SocketAddr::from((Ipv4Addr::LOCALHOST, 53))]);
        let mut held = Vec::new();
        for _ in 0..MAX_PER_TENANT {
            held.push(resolver.turns.take(Tenant(1)).await.unwrap());
        }
        let busy = resolver.resolve(Tenant(1), "example.test").await.unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        assert!(resolver.failures.get("example.test").is_none(), "other tenants may look it up");
    }

    #[test]
    fn tenants_without_lookups_are_forgotten() {
        let turns = Turns::default();
        let held = turns.share(Tenant(0));
        (1..10_000).for_each(|tenant| drop(turns.share(Tenant(tenant))));
        assert!(turns.tenants.lock().unwrap().len() <= MAX_TENANTS);
        assert!(Arc::ptr_eq(&held, &turns.share(Tenant(0))));
    }

    #[test]
    fn both_versions_are_among_the_first_addresses() {
        let sorted = |texts: &[&str]| -> Vec<String> {
            let addresses = texts.iter().map(|text| text.parse().unwrap()).collect();
            alternate_versions(addresses).iter().map(IpAddr::to_string).collect()
        };
        assert_eq!(
            sorted(&["::1", "::2", "1.0.0.1", "1.0.0.2", "1.0.0.3"]),
            ["1.0.0.1", "::1", "1.0.0.2", "::2", "1.0.0.3"]
        );
        assert_eq!(sorted(&["::1", "::2", "1.0.0.1"]), ["1.0.0.1", "::1", "::2"]);
        assert_eq!(sorted(&["::1"]), ["::1"]);
        assert!(sorted(&[]).is_empty());
    }
}
