//! Authentication: maps tokens to callers.

use std::{net::IpAddr, sync::Arc};

use relay_domain::access::token::{TokenHash, TokenKind};

use super::{callers::Credential, limits::Limits, tokens::Tokens};
use crate::{
    EngineError, EngineResult, agents::last_seen::LastSeenRecorder, core::Core, error::BadCredential,
    observers::Observers, workspaces::suspensions::Suspensions,
};

/// State of the token of an open node socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeTokenState {
    Valid,
    /// Revoked or rotated, or its node or workspace has ended.
    Revoked,
    /// An operator has suspended the workspace or drained the node.
    SuspendedOrDrained,
}

/// Handle of callers: authentication, and repeated requests.
#[derive(Clone)]
pub struct Access {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) observers: Observers,
    pub(crate) suspensions: Arc<Suspensions>,
    pub(crate) seen: Arc<LastSeenRecorder>,
    pub(crate) limits: Arc<Limits>,
}

impl Access {
    /// Runs the authentication of a token, charged to the client's address if the token turns out to be unknown. A
    /// token that was valid within the last minutes is never refused here, whatever others at its address do.
    ///
    /// # Errors
    /// When the address has presented too many unknown tokens; otherwise those of `authentication`.
    pub async fn limit_unknown<T>(
        &self,
        token: &str,
        address: Option<IpAddr>,
        authentication: impl Future<Output = EngineResult<T>>,
    ) -> EngineResult<T> {
        let hash = TokenHash::from_token(token);
        let (Some(address), Some(limit), false) =
            (address, self.limits.unknown_tokens(), self.tokens.is_familiar(&hash))
        else {
            return authentication.await;
        };
        limit.charge(address).map_err(|retry_after| EngineError::TooManyUnknownTokens { retry_after })?;
        let authenticated = authentication.await;
        match &authenticated {
            // The token is unknown, so the charge stays.
            Err(EngineError::Unauthenticated(_)) => return authenticated,
            // `Tokens` looks up neither webhook tokens nor signed observer tokens, so only this makes them familiar.
            Ok(_) => self.tokens.remember(hash),
            // Storage is unavailable, or the workspace is suspended: this says nothing about the token.
            Err(_) => {}
        }
        limit.refund(address);
        authenticated
    }

    /// Authenticates a token.
    ///
    /// # Errors
    /// When the token is malformed, unknown, revoked or of an ended workspace.
    pub async fn authenticate(&self, token: &str) -> EngineResult<Credential> {
        let kind = TokenKind::from_prefix(token).ok_or(EngineError::Unauthenticated(BadCredential::TokenFormat))?;
        // Signed ones are verified without a lookup, and all of them are judged by the latest state of their token.
        if kind == TokenKind::Observer {
            let access = self.observers.authenticate(token).await?;
            self.suspensions.check_not_suspended(access.scope)?;
            return Ok(Credential::Observer(access));
        }
        let credential = self.tokens.cached_credential(kind, TokenHash::from_token(token)).await?;
        // Apart from the cached credential: a suspension revokes no token, and its list is read on its own.
        self.suspensions.check_not_suspended(credential.scope())?;
        if let Credential::Agent(agent) = &credential {
            self.seen.note(agent.scope, agent.agent_id, self.core.now());
        }
        Ok(credential)
    }

    /// Checks the token of an open node socket, from the cache of a second; a revocation counts at once.
    ///
    /// # Errors
    /// When storage is unavailable.
    pub async fn check_node_token(&self, hash: TokenHash) -> EngineResult<NodeTokenState> {
        match self.tokens.cached_credential(TokenKind::Node, hash).await {
            Ok(Credential::Node(node)) if self.suspensions.is_suspended_or_drained(node.scope, &node.node_id) => {
                Ok(NodeTokenState::SuspendedOrDrained)
            }
            Ok(_) => Ok(NodeTokenState::Valid),
            Err(EngineError::Unauthenticated(_)) => Ok(NodeTokenState::Revoked),
            Err(error) => Err(error),
        }
    }

    /// Returns those of these tokens that are revoked, or whose workspace has ended.
    pub async fn revoked_tokens(&self, hashes: &[TokenHash]) -> EngineResult<Vec<TokenHash>> {
        // Not from the cache: this finds the open sockets that lost the hint of a revocation.
        Ok(self.core.store.revoked_tokens(hashes).await?)
    }
}
