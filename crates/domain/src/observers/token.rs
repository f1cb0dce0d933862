//! [`ObserverToken`]: a token as the holder of the workspace key sees it.

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::ObserverTokenId;

/// Stored observer token.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ObserverToken {
    pub token_id: ObserverTokenId,
    /// Unique among the active tokens of the workspace.
    pub name: String,
    pub description: Option<String>,
    /// Texts, because a newer release may have stored scopes that this one does not know.
    pub scopes: Vec<String>,
    /// Not parsed, for the same reason.
    pub filters: Value,
    /// Number of rotations, from 1.
    pub version: i64,
    pub created_at: DateTime<Utc>,
    /// Last change or rotation.
    pub updated_at: Option<DateTime<Utc>>,
    pub expires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
    /// Accurate to half a minute.
    pub last_used_at: Option<DateTime<Utc>>,
    /// End of the token or of its workspace, whichever is first.
    pub effective_expiry: Option<DateTime<Utc>>,
}
