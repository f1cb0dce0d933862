//! Errors of store calls.

use crate::recovery::epoch::OTHER_EPOCH;

pub type StoreResult<T> = Result<T, StoreError>;

/// Failure of a store call. A call that loses a race, or finds nothing, returns an outcome or `None` instead.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres cannot be reached, is starting or stopping, or the pool gave no connection in time. Says nothing about
    /// the request, which may be retried.
    #[error("postgres is unavailable while {doing}")]
    Unavailable {
        /// Operation and object, for logs.
        doing: &'static str,
        source: sqlx::Error,
    },
    /// The transaction was aborted by a deadlock, a serialization failure or a lock timeout. It may be retried.
    #[error("the transaction was aborted while {doing}")]
    Aborted { doing: &'static str, source: sqlx::Error },
    /// The connection was lost during COMMIT, so the commit outcome is unknown. Callers whose operation is not
    /// idempotent must not retry.
    #[error("commit outcome unknown after {doing}")]
    OutcomeUnknown { doing: &'static str, source: sqlx::Error },
    /// The database, or its last recovery, is not the one that this process knows. Nothing was done; the call may be
    /// retried when the process has recovered.
    #[error("another recovery epoch was met while {doing}")]
    OtherEpoch { doing: &'static str },
    /// Postgres rejected the data or the statement.
    #[error("postgres refused {doing}")]
    Refused { doing: &'static str, source: sqlx::Error },
    /// A stored value is invalid for its column. Only an operator can repair the row.
    #[error("corrupt value in {table}.{column}, row {row}")]
    Corrupt {
        /// First table that the statement reads (the column may come from a joined one), or the operation.
        table: &'static str,
        /// Column, as the statement names it.
        column: String,
        /// Identifying columns of the row, if they are known.
        row: String,
        source: sqlx::Error,
    },
}

impl StoreError {
    /// Converts a driver error; `doing` names the operation and its object.
    #[expect(clippy::wildcard_enum_match_arm, reason = "sqlx may add errors")]
    pub(crate) fn from_sqlx(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| match &source {
            sqlx::Error::Database(database) => match database.code().as_deref() {
                // deadlock, serialization failure, lock not available (lock_timeout)
                Some("40P01" | "40001" | "55P03") => Self::Aborted { doing, source },
                // admin shutdown, crash shutdown, cannot connect now, too many connections, query canceled,
                // idle in transaction for too long, and class 08 (connection)
                Some("57P01" | "57P02" | "57P03" | "53300" | "57014" | "25P03") => Self::Unavailable { doing, source },
                Some(OTHER_EPOCH) => Self::OtherEpoch { doing },
                Some(code) if code.starts_with("08") => Self::Unavailable { doing, source },
                _ => Self::Refused { doing, source },
            },
            // The connection is at fault, not the statement, so another attempt may succeed.
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Self::Unavailable { doing, source },
            // The rows of a statement that decodes as a whole are not named one by one.
            sqlx::Error::ColumnDecode { index, .. } => {
                let column = index.trim_matches('"').to_owned();
                Self::Corrupt { table: doing, column, row: "unknown".to_owned(), source }
            }
            _ => Self::Refused { doing, source },
        }
    }

    /// Converts an error of COMMIT for operations that are not idempotent: a lost connection becomes
    /// [`Self::OutcomeUnknown`].
    pub(crate) fn from_commit(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| {
            // Also for an end that Postgres reported itself: to look up a known outcome costs less than to repeat the
            // operation.
            let error = Self::from_sqlx(doing)(source);
            if let Self::Unavailable { doing, source } = error { Self::OutcomeUnknown { doing, source } } else { error }
        }
    }

    /// Creates an `Unavailable` without a call, for callers that have just seen Postgres fail or that gave up waiting.
    #[must_use]
    pub const fn unavailable(doing: &'static str) -> Self {
        Self::Unavailable { doing, source: sqlx::Error::PoolTimedOut }
    }

    /// Returns true if `constraint` is the one that was violated.
    #[must_use]
    pub fn violates(&self, constraint: &str) -> bool {
        let source = match self {
            Self::OtherEpoch { .. } => return false,
            Self::Unavailable { source, .. }
            | Self::Aborted { source, .. }
            | Self::OutcomeUnknown { source, .. }
            | Self::Refused { source, .. }
            | Self::Corrupt { source, .. } => source,
        };
        source.as_database_error().and_then(|e| e.constraint()) == Some(constraint)
    }

    /// Returns true if Postgres itself ended the statement, and with it a transaction of this one statement. A backend
    /// that is to stop says so before a commit or after its answer. A lost one says nothing, and one that ends because
    /// another crashed may have committed.
    pub(crate) fn ended_before_commit(&self) -> bool {
        let Self::Unavailable { source, .. } = self else { return false };
        let code = source.as_database_error().and_then(|error| error.code());
        // admin shutdown, cannot connect now, too many connections, query canceled
        matches!(code.as_deref(), Some("57P01" | "57P03" | "53300" | "57014"))
    }

    /// Returns true if Postgres could not be reached, or not the database that this process knows, as opposed to having
    /// refused.
    #[must_use]
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::OutcomeUnknown { .. } | Self::OtherEpoch { .. })
    }
}
