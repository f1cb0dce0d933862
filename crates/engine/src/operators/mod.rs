//! Operators: who runs the installation, as opposed to who uses a workspace of it.
//!
//! An operator shows the bootstrap secret, or a JWT of the configured OIDC issuer. Where neither is
//! configured there are no operators, and whoever reaches the engine may create workspaces.

mod issuer;

use relay_domain::{
    WorkspaceScope,
    plan::{OwnLimits, Plan},
    token::TokenHash,
};

use self::issuer::Issuer;
pub use self::issuer::IssuerConfig;
pub(crate) use self::issuer::check_url as check_issuer_url;
use crate::{Engine, EngineError, EngineResult, limits::Quotas, settings::SHORTEST_SECRET};

/// How operators are known.
#[derive(Debug, Default)]
pub struct OperatorsConfig {
    /// What an operator may show, at least 32 bytes.
    pub bootstrap_secret: Option<String>,
    /// Whose JWTs an operator may show.
    pub issuer: Option<IssuerConfig>,
    /// Whether only operators create workspaces without a workspace's key.
    pub hosted: bool,
}

/// Knows operators.
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
    /// From the configuration.
    ///
    /// # Errors
    /// When the secret is too short, a URL cannot be used, or the installation is hosted and nobody could
    /// ever create a workspace.
    pub fn new(config: OperatorsConfig) -> EngineResult<Self> {
        let invalid = |why: &str| Err(EngineError::InvalidRequest(why.to_owned()));
        if config.bootstrap_secret.as_ref().is_some_and(|secret| secret.len() < SHORTEST_SECRET) {
            return invalid("the bootstrap secret must have at least 32 bytes");
        }
        if config.hosted && config.bootstrap_secret.is_none() && config.issuer.is_none() {
            return invalid("a hosted installation needs a bootstrap secret or an OIDC issuer");
        }
        Ok(Self {
            secret: config.bootstrap_secret.as_deref().map(TokenHash::of),
            issuer: config.issuer.map(Issuer::new).transpose()?,
            hosted: config.hosted,
        })
    }

    /// Whether workspaces are created by operators and owners only.
    #[must_use]
    pub const fn is_hosted(&self) -> bool {
        self.hosted
    }

    /// Whether there can be operators at all.
    #[must_use]
    pub const fn are_known(&self) -> bool {
        self.secret.is_some() || self.issuer.is_some()
    }

    /// Whether this is the bootstrap secret. Takes the same time whatever is wrong with it.
    #[must_use]
    pub fn is_secret(&self, presented: &str) -> bool {
        // Digests are compared, so that not even a length shows.
        self.secret.as_ref().is_some_and(|secret| *secret == TokenHash::of(presented))
    }

    /// Lets an operator in, by the secret or by a JWT.
    ///
    /// # Errors
    /// When it is neither; or the issuer's keys cannot be fetched, so that a JWT cannot be judged.
    pub async fn admit(&self, presented: &str) -> EngineResult<()> {
        if self.is_secret(presented) {
            return Ok(());
        }
        match &self.issuer {
            Some(issuer) => issuer.verify(presented).await,
            None => Err(EngineError::NotAnOperator),
        }
    }
}

impl Engine {
    /// What a workspace may use, for an operator.
    ///
    /// # Errors
    /// When there is no such workspace, or storage is away.
    pub async fn quotas_for_operator(&self, workspace: &str) -> EngineResult<Quotas> {
        self.quotas(scope_for_operator(workspace)?).await
    }

    /// Puts a workspace on a plan, if one is given, and replaces what differs from it, for an operator.
    ///
    /// # Errors
    /// When a number is out of range, there is no such workspace, or storage is away.
    pub async fn set_quotas_for_operator(
        &self,
        workspace: &str,
        plan: Option<Plan>,
        own: &OwnLimits,
    ) -> EngineResult<Quotas> {
        self.set_quotas(scope_for_operator(workspace)?, plan, own).await
    }
}

/// An operator may act on any workspace that it names.
fn scope_for_operator(workspace: &str) -> EngineResult<WorkspaceScope> {
    let id = workspace.parse().map_err(|_| EngineError::WorkspaceNotFound)?;
    Ok(WorkspaceScope::from_verified_token(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operators(secret: Option<&str>, hosted: bool) -> EngineResult<Operators> {
        Operators::new(OperatorsConfig { bootstrap_secret: secret.map(str::to_owned), issuer: None, hosted })
    }

    #[tokio::test]
    async fn the_secret_lets_in_and_nothing_else_does() -> EngineResult<()> {
        let secret = "0123456789abcdef0123456789abcdef";
        let known = operators(Some(secret), true)?;
        assert!(known.admit(secret).await.is_ok());
        for other in ["", "0123456789abcdef0123456789abcdeF", &secret[1..], "a.b.c"] {
            assert!(matches!(known.admit(other).await, Err(EngineError::NotAnOperator)), "{other:?}");
        }
        assert!(operators(None, false)?.admit("").await.is_err(), "without a secret there is none to know");
        assert!(operators(Some("short"), false).is_err() && operators(None, true).is_err());
        Ok(())
    }
}
