//! Single statements on the pool: each takes a connection, and has a deadline.

use futures::{
    SinkExt as _, StreamExt as _, TryStreamExt as _,
    channel::mpsc,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use sqlx::{
    Describe, Either, Execute, Executor, Postgres, SqlStr,
    postgres::{PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

use super::{ConnectionPool, Purpose};

/// Rows that are read before the caller takes them.
const ROWS_AHEAD: usize = 16;

impl ConnectionPool {
    /// Executes one statement on a connection for this purpose, before its deadline.
    pub(crate) async fn fetch_all_for<'q, E>(&self, purpose: Purpose, query: E) -> sqlx::Result<Vec<PgRow>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let mut lease = self.for_statement(purpose).await?;
        let rows = self.before_deadline(lease.fetch_all(query)).await?;
        self.before_deadline(lease.finish()).await?;
        Ok(rows)
    }
}

/// Executes one statement on a connection of the pool, before its deadline.
impl<'p> Executor<'p> for &'p ConnectionPool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, sqlx::Result<Either<PgQueryResult, PgRow>>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        // A channel, because the stream has to own the lease of the connection that its rows are read from.
        let (mut rows, taken) = mpsc::channel(ROWS_AHEAD);
        let statement = async move {
            let mut lease = self.for_statement(Purpose::Others).await?;
            let sent = async {
                let mut steps = lease.fetch_many(query);
                while let Some(step) = steps.try_next().await? {
                    // Fails only when the stream is dropped, and this with it.
                    let _ = rows.send(step).await;
                }
                Ok(())
            };
            // The deadline includes the caller's pauses between rows: a stream that is not read holds its connection
            // no longer.
            self.before_deadline(sent).await?;
            self.before_deadline(lease.finish()).await
        };
        // Polled together by the caller of the stream.
        let failure = stream::once(statement).filter_map(async |done: sqlx::Result<()>| done.err().map(Err));
        Box::pin(stream::select(taken.map(Ok), failure))
    }

    fn execute<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<PgQueryResult>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(async move {
            let mut lease = self.for_statement(Purpose::Others).await?;
            let done = self.before_deadline(lease.execute(query)).await?;
            self.before_deadline(lease.finish()).await?;
            Ok(done)
        })
    }

    // Collects without the channel of a stream.
    fn fetch_all<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Vec<PgRow>>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(self.fetch_all_for(Purpose::Others, query))
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(async move {
            let mut lease = self.for_statement(Purpose::Others).await?;
            let row = self.before_deadline(lease.fetch_optional(query)).await?;
            self.before_deadline(lease.finish()).await?;
            Ok(row)
        })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'p: 'e,
    {
        self.driver.prepare_with(sql, parameters)
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<Describe<Postgres>>>
    where
        'p: 'e,
    {
        self.driver.describe(sql)
    }
}
