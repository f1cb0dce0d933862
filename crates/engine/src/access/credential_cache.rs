//! [`CredentialCache`]: owners of tokens, for a second. Used by `tokens.rs`. Quotas of workspaces are invalidated in
//! the same way (`limits/quotas.rs`).
//!
//! A credential that was read before an invalidation of its token or workspace is never served after it, even if the
//! read ends and is cached later. Each credential carries the number of invalidations before its read; an invalidation
//! leaves its own number with its subject, and credentials with a lower one do not count. The invalidation closures of
//! `moka` cannot give this guarantee: the cache drops a closure once its maintenance has visited the entries that it
//! knows, so that an entry whose insertion it has not seen yet is served again.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use moka::sync::Cache;
use relay_domain::{WorkspaceId, access::token::TokenHash};
use tokio::time::Instant;

use super::callers::Credential;

/// Bound of the cache; further tokens evict the least used.
const MAX_CREDENTIALS: u64 = 100_000;
/// Number of subjects whose latest invalidation is kept apart. Subjects that share a place are invalidated together,
/// which costs a lookup each. A prime, because the low bits of ids repeat.
const PLACES: usize = 1021;

/// Begin of a read of storage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadMark {
    /// Number of invalidations before.
    number: u64,
    at: Instant,
}

#[derive(Debug, Clone)]
struct CachedCredential {
    credential: Credential,
    read_at: ReadMark,
}

/// Cache of authenticated tokens.
#[derive(Debug)]
pub(crate) struct CredentialCache {
    credentials: Cache<TokenHash, CachedCredential>,
    /// Time for which a credential is served, from the begin of its read on.
    cached_for: Duration,
    /// Number of invalidations.
    count: AtomicU64,
    /// Numbers of the latest invalidations: of tokens, of workspaces, and of everything.
    tokens: LatestInvalidations,
    workspaces: LatestInvalidations,
    all: AtomicU64,
}

impl CredentialCache {
    /// Creates a cache that serves a credential for `cached_for`.
    pub(crate) fn new(cached_for: Duration) -> Self {
        Self {
            credentials: Cache::builder().max_capacity(MAX_CREDENTIALS).time_to_live(cached_for).build(),
            cached_for,
            count: AtomicU64::new(0),
            tokens: LatestInvalidations::new(),
            workspaces: LatestInvalidations::new(),
            all: AtomicU64::new(0),
        }
    }

    pub(crate) fn get(&self, hash: &TokenHash) -> Option<Credential> {
        let CachedCredential { credential, read_at } = self.credentials.get(hash)?;
        let workspace = credential.scope().workspace_id();
        let invalidated = [
            self.tokens.latest(place_of_token(hash)),
            self.workspaces.latest(place_of_workspace(workspace)),
            self.all.load(Ordering::SeqCst),
        ];
        // The cache itself counts from the insertion, which a slow read delays.
        let is_young = read_at.at.elapsed() < self.cached_for;
        (is_young && invalidated.iter().all(|number| *number <= read_at.number)).then_some(credential)
    }

    /// Begins a read of storage whose outcome [`Self::insert`] caches.
    pub(crate) fn begin_read(&self) -> ReadMark {
        ReadMark { number: self.count.load(Ordering::SeqCst), at: Instant::now() }
    }

    pub(crate) fn insert(&self, hash: TokenHash, credential: Credential, read_at: ReadMark) {
        self.credentials.insert(hash, CachedCredential { credential, read_at });
    }

    /// Invalidates the credential of a token, and reads of it that have begun.
    pub(crate) fn forget(&self, hash: &TokenHash) {
        self.tokens.record(place_of_token(hash), self.next_number());
    }

    /// Invalidates the credentials of a workspace, and reads of them that have begun.
    pub(crate) fn forget_workspace(&self, workspace: WorkspaceId) {
        self.workspaces.record(place_of_workspace(workspace), self.next_number());
    }

    /// Invalidates all credentials, and reads that have begun.
    pub(crate) fn forget_all(&self) {
        self.all.fetch_max(self.next_number(), Ordering::SeqCst);
    }

    fn next_number(&self) -> u64 {
        // Raised before its subject is marked. A read that begins in between carries the new number, rightly so:
        // storage has changed before.
        self.count.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// Number of the latest invalidation for each place.
#[derive(Debug)]
pub(super) struct LatestInvalidations(Box<[AtomicU64]>);

impl LatestInvalidations {
    pub(super) fn new() -> Self {
        Self((0..PLACES).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn latest(&self, place: usize) -> u64 {
        self.0[place].load(Ordering::SeqCst)
    }

    pub(super) fn record(&self, place: usize, number: u64) {
        // Numbers of concurrent invalidations arrive in any order.
        self.0[place].fetch_max(number, Ordering::SeqCst);
    }
}

fn place_of_token(hash: &TokenHash) -> usize {
    let [first, second, third, fourth, ..] = *hash.as_bytes();
    u32::from_le_bytes([first, second, third, fourth]) as usize % PLACES
}

pub(super) fn place_of_workspace(workspace: WorkspaceId) -> usize {
    // Below `PLACES`, so the conversion cannot fail.
    usize::try_from(workspace.get().unsigned_abs() % PLACES as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use relay_domain::WorkspaceScope;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn workspace(id: i64) -> (WorkspaceId, Credential) {
        let id = WorkspaceId::new(id);
        (id, Credential::Workspace { scope: WorkspaceScope::from_engine_row(id) })
    }

    /// Asserts that an invalidation ends cached credentials and reads in progress, and no later ones.
    fn ends_earlier_reads(forget: impl Fn(&CredentialCache, &TokenHash, WorkspaceId)) {
        let cache = CredentialCache::new(LONG);
        let ((id, owner), hash) = (workspace(7), TokenHash::from_token("rk_live_7"));
        cache.insert(hash, owner.clone(), cache.begin_read());
        assert!(cache.get(&hash).is_some(), "cached");
        let begun = cache.begin_read();
        forget(&cache, &hash, id);
        assert!(cache.get(&hash).is_none(), "cached before the invalidation");
        cache.insert(hash, owner.clone(), begun);
        assert!(cache.get(&hash).is_none(), "read before the invalidation and cached after it");
        cache.insert(hash, owner, cache.begin_read());
        assert!(cache.get(&hash).is_some(), "read after the invalidation");
    }

    #[test]
    fn a_read_that_began_before_an_invalidation_is_not_served_after_it() {
        ends_earlier_reads(|cache, hash, _| cache.forget(hash));
        ends_earlier_reads(|cache, _, workspace| cache.forget_workspace(workspace));
        ends_earlier_reads(|cache, _, _| cache.forget_all());
    }

    #[test]
    fn an_invalidation_leaves_other_tokens_and_workspaces() {
        let cache = CredentialCache::new(LONG);
        let ((_, owner), hash) = (workspace(7), TokenHash::from_token("rk_live_7"));
        cache.insert(hash, owner, cache.begin_read());
        cache.forget(&TokenHash::from_token("rk_live_8"));
        cache.forget_workspace(WorkspaceId::new(8));
        assert!(cache.get(&hash).is_some());
    }

    /// The maintenance of the cache runs at any time in any thread that uses it.
    #[test]
    fn a_workspace_stays_invalidated_while_others_are_cached() {
        let cache = CredentialCache::new(LONG);
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|threads| {
            for thread in 1..=3_i64 {
                let (cache, has_ended) = (&cache, &has_ended);
                threads.spawn(move || {
                    let (id, owner) = workspace(thread);
                    for number in 0.. {
                        if has_ended.load(Ordering::Relaxed) {
                            return;
                        }
                        let hash = TokenHash::from_token(&format!("at_live_{thread}_{}", number % 100));
                        cache.insert(hash, owner.clone(), cache.begin_read());
                        if number % 10 == 0 {
                            cache.forget_workspace(id);
                        }
                    }
                });
            }
            let ((id, owner), hash) = (workspace(7), TokenHash::from_token("rk_live_7"));
            let mut served = 0;
            for _ in 0..20_000 {
                cache.insert(hash, owner.clone(), cache.begin_read());
                cache.forget_workspace(id);
                served += usize::from(cache.get(&hash).is_some());
            }
            has_ended.store(true, Ordering::Relaxed);
            assert_eq!(served, 0, "credentials served after their invalidation");
        });
    }
}
