//! What can go wrong between the engine and Postgres.

/// The result of a store call.
pub type StoreResult<T> = Result<T, StoreError>;

/// Postgres did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres cannot be reached, is starting or stopping, or the pool gave no connection in time.
    /// Nothing is known to be wrong with the request: it may be tried again later.
    #[error("postgres is unavailable while {doing}")]
    Unavailable {
        /// The operation and its object.
        doing: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
    /// The transaction lost against others (deadlock, serialisation, lock timeout). Try it again.
    #[error("the transaction was aborted while {doing}")]
    Aborted {
        /// The operation and its object.
        doing: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
    /// Postgres was lost while it committed: what was asked may be done, and nobody can say. Not to be tried again by
    /// whoever would do it twice.
    #[error("nobody heard of the commit after {doing}")]
    OutcomeUnknown {
        /// The operation and its object.
        doing: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
    /// Postgres refused the data or the statement.
    #[error("postgres refused {doing}")]
    Refused {
        /// The operation and its object.
        doing: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
}

impl StoreError {
    /// Turns a driver error into one of ours; `doing` names the operation and its object.
    pub(crate) fn from_sqlx(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| match &source {
            sqlx::Error::Database(database) => match database.code().as_deref() {
                // deadlock, serialization failure, lock not available (lock_timeout)
                Some("40P01" | "40001" | "55P03") => Self::Aborted { doing, source },
                // admin shutdown, crash shutdown, cannot connect now, too many connections, query canceled,
                // idle in transaction for too long, and class 08 (connection)
                Some("57P01" | "57P02" | "57P03" | "53300" | "57014" | "25P03") => Self::Unavailable { doing, source },
                Some(code) if code.starts_with("08") => Self::Unavailable { doing, source },
                _ => Self::Refused { doing, source },
            },
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Self::Unavailable { doing, source },
            _ => Self::Refused { doing, source },
        }
    }

    /// Turns what became of a COMMIT into one of ours, where the same once more would be done twice.
    pub(crate) fn from_commit(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| match Self::from_sqlx(doing)(source) {
            Self::Unavailable { doing, source } => Self::OutcomeUnknown { doing, source },
            other => other,
        }
    }

    /// For a caller that knows from another call, made a moment ago, that Postgres is away.
    #[must_use]
    pub const fn still_away(doing: &'static str) -> Self {
        Self::Unavailable { doing, source: sqlx::Error::PoolTimedOut }
    }

    /// Whether the violated constraint, if any, is the named one.
    #[must_use]
    pub fn violates(&self, constraint: &str) -> bool {
        let (Self::Unavailable { source, .. }
        | Self::Aborted { source, .. }
        | Self::OutcomeUnknown { source, .. }
        | Self::Refused { source, .. }) = self;
        source.as_database_error().and_then(|e| e.constraint()) == Some(constraint)
    }

    /// Whether Postgres itself was away, as opposed to having refused.
    #[must_use]
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::OutcomeUnknown { .. })
    }
}
