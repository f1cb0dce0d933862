//! Everything a use case can refuse. The gateway gives each variant its status and code.

use relay_store::StoreError;

/// The result of a use case.
pub type EngineResult<T> = Result<T, EngineError>;

/// Why a use case was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Postgres is away. Nothing was done.
    #[error("storage is unavailable")]
    Unavailable(#[source] StoreError),
    /// Storage failed for a reason of its own.
    #[error("storage failed")]
    Store(#[source] StoreError),
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        if error.is_unavailable() { Self::Unavailable(error) } else { Self::Store(error) }
    }
}
