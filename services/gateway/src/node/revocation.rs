//! Closes the sockets of revoked tokens, of deleted and of expired workspaces.
//!
//! A hint says so at once. Where it was lost, and for a workspace that expires, storage is asked every few seconds.

use std::time::Duration;

use relay_domain::{WorkspaceScope, access::token::TokenHash};
use relay_engine::Engine;

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

    /// Closes the sockets of a deleted workspace.
    pub(super) fn close_deleted(&self, scope: WorkspaceScope) {
        let maps = self.maps();
        let own = maps.nodes.iter().filter(|((workspace, _), _)| *workspace == scope);
        own.flat_map(|(_, ids)| ids).filter_map(|id| maps.peers.get(id)).for_each(Peer::close_revoked);
    }

    /// Asks storage about the tokens of all sockets.
    pub(super) async fn check_tokens(&self, engine: &Engine) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let tokens: Vec<TokenHash> = self.maps().tokens.keys().copied().collect();
            for some in tokens.chunks(TOKENS_PER_QUERY) {
                match engine.access().revoked_tokens(some).await {
                    Ok(revoked) => revoked.iter().for_each(|token| self.close_revoked(token)),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "token check failed, retrying");
                        break;
                    }
                }
            }
        }
    }
}

impl Peer {
    fn close_revoked(&self) {
        let (code, reason) = close_of_revoked(self.is_direct);
        self.handle.close(code, reason);
    }
}
