//! Connection to Postgres on which this crate executes its statements. [`DatabaseSession`] is what a lease or a
//! transaction leads to.

use futures::{future::BoxFuture, stream::BoxStream};
use sqlx::{
    Connection as _, Describe, Either, Execute, Executor, PgConnection, Postgres, SqlStr,
    error::BoxDynError,
    pool::PoolConnection,
    postgres::{PgArguments, PgCopyIn, PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

/// Preparation of statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statements {
    /// Prepared once for each connection, under a name.
    Named,
    /// Prepared at each execution, without a name: the server changes between transactions.
    Unnamed,
}

/// Connection of the driver's pool, with the preparation of its statements.
#[derive(Debug)]
pub(crate) struct DatabaseSession {
    connection: PoolConnection<Postgres>,
    statements: Statements,
}

impl DatabaseSession {
    pub(super) fn new(connection: PoolConnection<Postgres>, statements: Statements) -> Self {
        Self { connection, statements }
    }

    /// Makes a round trip.
    pub(super) async fn ping(&mut self) -> sqlx::Result<()> {
        self.connection.ping().await
    }

    /// Lets the driver's pool close the connection instead of taking it back.
    pub(super) fn close_on_drop(&mut self) {
        self.connection.close_on_drop();
    }

    /// Begins a `COPY … FROM STDIN`.
    pub(crate) async fn copy_in_raw(&mut self, statement: &'static str) -> sqlx::Result<PgCopyIn<&mut PgConnection>> {
        self.connection.copy_in_raw(statement).await
    }
}

impl<'c> Executor<'c> for &'c mut DatabaseSession {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, sqlx::Result<Either<PgQueryResult, PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        match self.statements {
            Statements::Named => self.connection.fetch_many(query),
            Statements::Unnamed => self.connection.fetch_many(UnnamedQuery(query)),
        }
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        match self.statements {
            Statements::Named => self.connection.fetch_optional(query),
            Statements::Unnamed => self.connection.fetch_optional(UnnamedQuery(query)),
        }
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        self.connection.prepare_with(sql, parameters)
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<Describe<Postgres>>>
    where
        'c: 'e,
    {
        self.connection.describe(sql)
    }
}

/// Query that the driver prepares without a name. It sends preparation and execution separately, so both have to be in
/// one transaction.
struct UnnamedQuery<E>(E);

impl<'q, E: Execute<'q, Postgres>> Execute<'q, Postgres> for UnnamedQuery<E> {
    fn sql(self) -> SqlStr {
        self.0.sql()
    }

    // A prepared statement is executed by its name, which the next server does not know.
    fn statement(&self) -> Option<&PgStatement> {
        None
    }

    fn take_arguments(&mut self) -> Result<Option<PgArguments>, BoxDynError> {
        self.0.take_arguments()
    }

    fn persistent(&self) -> bool {
        false
    }
}
