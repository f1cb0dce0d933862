//! Operators: they run the installation, as opposed to the users of one workspace. Main type: [`Operators`].
//!
//! An operator presents the bootstrap secret or a JWT of the configured OIDC issuer. Where neither is configured there
//! are no operators, and everyone who reaches the engine may create workspaces.

mod issuer;

use relay_domain::{
    WorkspaceScope,
    access::token::TokenHash,
    workspaces::plan::{LimitOverrides, Plan},
};

use self::issuer::Issuer;
pub use self::issuer::IssuerConfig;
pub(crate) use self::issuer::{check_url as check_issuer_url, is_loopback};
use crate::{
    EngineError, EngineResult,
    access::{
        limits::{QuotaCache, Quotas},
        secrets::MIN_SECRET_BYTES,
    },
    error::{BadCredential, Missing},
};

/// Configuration of operator access.
#[derive(Debug, Default)]
pub struct OperatorsConfig {
    /// At least 32 bytes.
    pub bootstrap_secret: Option<String>,
    /// Whose JWTs an operator may show.
    pub issuer: Option<IssuerConfig>,
    /// True if creating a workspace without a workspace key needs an operator.
    pub hosted: bool,
}

/// Authenticator of operators.
pub struct Operators {
    secret: Option<TokenHash>,
    issuer: Option<Issuer>,
    hosted: bool,
}

impl std::fmt::Debug for Operators {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operators").field("hosted", &self.hosted).finish_non_exhaustive()
    }
}

impl Operators {
    /// Creates the authenticator.
    ///
    /// # Errors
    /// When the secret is too short, a URL is invalid, or the installation is hosted without any way to authenticate an
    /// operator.
    pub fn new(config: OperatorsConfig) -> EngineResult<Self> {
        let invalid = |why: &str| Err(EngineError::invalid_request(why.to_owned()));
        if config.bootstrap_secret.as_ref().is_some_and(|secret| secret.len() < MIN_SECRET_BYTES) {
            return invalid("the bootstrap secret must have at least 32 bytes");
        }
        if config.hosted && config.bootstrap_secret.is_none() && config.issuer.is_none() {
            return invalid("a hosted installation needs a bootstrap secret or an OIDC issuer");
        }
        Ok(Self {
            secret: config.bootstrap_secret.as_deref().map(TokenHash::from_token),
            issuer: config.issuer.map(Issuer::new).transpose()?,
            hosted: config.hosted,
        })
    }

    /// True if only operators and workspace keys create workspaces.
    #[must_use]
    pub const fn is_hosted(&self) -> bool {
        self.hosted
    }

    /// True if an operator can authenticate at all.
    #[must_use]
    pub const fn are_configured(&self) -> bool {
        self.secret.is_some() || self.issuer.is_some()
    }

    /// True if there is a bootstrap secret.
    #[must_use]
    pub const fn has_bootstrap_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Compares with the bootstrap secret in constant time.
    #[must_use]
    pub fn is_bootstrap_secret(&self, presented: &str) -> bool {
        // Digests are compared, so that not even the length leaks.
        self.secret.as_ref().is_some_and(|secret| *secret == TokenHash::from_token(presented))
    }

    /// Authenticates an operator by the secret or by a JWT.
    ///
    /// # Errors
    /// When it is neither, or the issuer's keys cannot be fetched to verify a JWT.
    pub async fn authenticate(&self, presented: &str) -> EngineResult<()> {
        // First, so that the secret works while the issuer is unavailable.
        if self.is_bootstrap_secret(presented) {
            return Ok(());
        }
        match &self.issuer {
            Some(issuer) => issuer.verify(presented).await,
            None => Err(EngineError::Unauthenticated(BadCredential::NotAnOperator)),
        }
    }
}

impl QuotaCache {
    pub async fn for_operator(&self, workspace: &str) -> EngineResult<Quotas> {
        self.load(scope_for_operator(workspace)?).await
    }

    /// Assigns a plan, if given, and replaces the overrides, for an operator.
    ///
    /// # Errors
    /// When a number is out of range, or there is no such workspace.
    pub async fn set_for_operator(
        &self,
        workspace: &str,
        plan: Option<Plan>,
        own: &LimitOverrides,
    ) -> EngineResult<Quotas> {
        self.set(scope_for_operator(workspace)?, plan, own).await
    }
}

/// Trusts the workspace id: an operator may act on any workspace.
fn scope_for_operator(workspace: &str) -> EngineResult<WorkspaceScope> {
    let id = workspace.parse().map_err(|_| EngineError::NotFound(Missing::Workspace))?;
    Ok(WorkspaceScope::from_verified_token(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operators(secret: Option<&str>, hosted: bool) -> EngineResult<Operators> {
        Operators::new(OperatorsConfig { bootstrap_secret: secret.map(str::to_owned), issuer: None, hosted })
    }

    #[tokio::test]
    async fn only_the_bootstrap_secret_authenticates() -> EngineResult<()> {
        let secret = "0123456789abcdef0123456789abcdef";
        let known = operators(Some(secret), true)?;
        assert!(known.authenticate(secret).await.is_ok());
        for other in ["", "0123456789abcdef0123456789abcdeF", &secret[1..], "a.b.c"] {
            assert!(
                matches!(
                    known.authenticate(other).await,
                    Err(EngineError::Unauthenticated(BadCredential::NotAnOperator))
                ),
                "{other:?}"
            );
        }
        assert!(operators(None, false)?.authenticate("").await.is_err(), "without a secret there is none to know");
        assert!(operators(Some("short"), false).is_err() && operators(None, true).is_err());
        Ok(())
    }
}
