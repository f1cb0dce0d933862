//! [`ObserverAccess`]: what one observer may read, and the token that grants it.

use std::sync::{Arc, LazyLock};

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, WorkspaceScope, access::token::TokenHash, observers::ObserverView};

use super::{overrides, signed::VerifiedToken};

pub(super) static EVERYTHING: LazyLock<Arc<ObserverView>> = LazyLock::new(|| Arc::new(ObserverView::unrestricted()));

/// Access of an observer. Checked at creation; [`super::Observers::recheck`] checks again.
#[derive(Debug, Clone)]
pub struct ObserverAccess {
    pub scope: WorkspaceScope,
    /// `None` for a workspace key.
    pub token_id: Option<ObserverTokenId>,
    /// Number of rotations of the token, from 1; 0 for a workspace key.
    pub version: i64,
    pub view: Arc<ObserverView>,
    pub expires_at: Option<DateTime<Utc>>,
    pub(super) by: AccessBasis,
}

/// Token that grants the access.
#[derive(Debug, Clone)]
pub(super) enum AccessBasis {
    Key(TokenHash),
    Signed(Arc<VerifiedToken>),
    Opaque(TokenHash),
}

impl ObserverAccess {
    /// Creates the access of an opaque token's row. `None` when this version does not understand it.
    pub(crate) fn from_row(
        hash: TokenHash,
        scope: WorkspaceScope,
        token_id: ObserverTokenId,
        version: i64,
        (scopes, filters): (&[String], &serde_json::Value),
        expires_at: Option<DateTime<Utc>>,
    ) -> Option<Self> {
        let view = overrides::parse_view(scopes, filters)?;
        Some(Self { scope, token_id: Some(token_id), version, view, expires_at, by: AccessBasis::Opaque(hash) })
    }
}

/// Returns the view of callers that are no observers: everything.
pub(crate) fn full_view() -> &'static ObserverView {
    &EVERYTHING
}
