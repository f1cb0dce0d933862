//! Closes the sockets of revoked tokens, of deleted and of expired workspaces.
//!
//! A hint says so at once. Where it was lost, and for a workspace that expires, storage is asked every few seconds.

use std::{collections::HashSet, sync::PoisonError, time::Duration};

use relay_domain::{WorkspaceScope, access::token::TokenHash};
use relay_engine::Engine;
use tokio::time::Instant;

use super::registry::{Peer, Registry};

/// Close code and reason of a revoked token.
const TOKEN_REVOKED: (u16, &str) = (1008, "token revoked");
/// Of a direct node. Its clients mint a token for every connection, which revokes the one before: the newest wins, and
/// the older must not come back at once.
const SUPERSEDED: (u16, &str) = (4001, "superseded");
/// Interval of the check, so that a socket closes within 5 s of a lost hint.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// Tokens per query.
const TOKENS_PER_QUERY: usize = 1000;

/// Returns how a socket of a revoked token is closed.
pub(super) const fn close_of_revoked(is_direct: bool) -> (u16, &'static str) {
    if is_direct { SUPERSEDED } else { TOKEN_REVOKED }
}

impl Registry {
    /// Closes the sockets that a revoked token opened.
    pub(super) fn close_revoked(&self, token: &TokenHash) {
        let maps = self.maps();
        let ids = maps.tokens.get(token).into_iter().flatten();
        ids.filter_map(|id| maps.peers.get(id)).for_each(Peer::close_revoked);
    }

    /// Requests a check of the tokens of a workspace that is said to be deleted. A hint alone closes nothing.
    pub(super) fn check_workspace(&self, scope: WorkspaceScope) {
        if self.maps().nodes.keys().any(|(workspace, _)| *workspace == scope) {
            self.ended.lock().unwrap_or_else(PoisonError::into_inner).insert(scope);
            self.ended_notify.notify_one();
        }
    }

    /// Asks storage about the tokens of all sockets, and in between about those of workspaces that have ended.
    pub(super) async fn check_tokens(&self, engine: &Engine) {
        let mut all_at = Instant::now() + CHECK_INTERVAL;
        loop {
            // Either end leads to a check: of the ended workspaces, or of all tokens once their time has come.
            let _ = tokio::time::timeout_at(all_at, self.ended_notify.notified()).await;
            let ended: HashSet<WorkspaceScope> =
                self.ended.lock().unwrap_or_else(PoisonError::into_inner).drain().collect();
            let all = all_at <= Instant::now();
            if all {
                all_at = Instant::now() + CHECK_INTERVAL;
            }
            let tokens = if all { self.open_tokens() } else { self.tokens_of(&ended) };
            for some in tokens.chunks(TOKENS_PER_QUERY) {
                match engine.access().revoked_tokens(some).await {
                    Ok(revoked) => revoked.iter().for_each(|token| self.close_revoked(token)),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "token check failed, retrying");
                        // Ended workspaces are not put back: the check of all tokens, 3 s later at most, includes
                        // theirs.
                        break;
                    }
                }
            }
        }
    }

    fn open_tokens(&self) -> Vec<TokenHash> {
        self.maps().tokens.keys().copied().collect()
    }

    fn tokens_of(&self, workspaces: &HashSet<WorkspaceScope>) -> Vec<TokenHash> {
        let maps = self.maps();
        let own = maps.nodes.iter().filter(|((workspace, _), _)| workspaces.contains(workspace));
        own.flat_map(|(_, ids)| ids).filter_map(|id| maps.peers.get(id)).map(|peer| peer.token).collect()
    }
}

impl Peer {
    fn close_revoked(&self) {
        let (code, reason) = close_of_revoked(self.is_direct);
        self.handle.close(code, reason);
    }
}
