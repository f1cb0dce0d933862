//! Statements that would run for ever: Postgres ends them, also when their client has left.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::tcp_client::TcpClient;
use relay_testkit::{client::Api, stack::Stack, wait};
use sqlx::PgPool;

/// Limit of a gateway's statements, and some for a loaded machine.
const ENDED_WITHIN: Duration = Duration::from_secs(15 + 15);
const STARTED_WITHIN: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_statement_ends_although_its_client_has_left() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "slow").await?.without_retries();
    let ann = key.register_agent("ann").await?;
    key.as_agent(&ann).post_message("general", "words").await?.success()?;
    let database = PgPool::connect(stack.database_url()).await?;
    // Reading the index takes ten minutes.
    for statement in [
        "ALTER TABLE message_search RENAME TO real_search",
        "CREATE FUNCTION read_slowly() RETURNS SETOF real_search LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_sleep(600); RETURN QUERY SELECT * FROM real_search; END'",
        "CREATE VIEW message_search AS SELECT * FROM read_slowly()",
    ] {
        sqlx::query(statement).execute(&database).await?;
    }
    let request =
        format!("GET /v1/search?q=words HTTP/1.1\r\nhost: relay\r\nauthorization: Bearer {}\r\n\r\n", key.token());
    let mut client = TcpClient::connect(stack.gateway(0).url()).await?;
    client.send(request.as_bytes()).await?;

    let running = || async {
        let active = "SELECT count(*) FROM pg_stat_activity
                       WHERE state = 'active' AND query LIKE '%message_search%' AND pid <> pg_backend_pid()";
        sqlx::query_scalar::<_, i64>(active).fetch_one(&database).await.unwrap()
    };
    wait::until("the search to start", STARTED_WITHIN, || async { running().await > 0 }).await;
    drop(client);
    wait::until("the search to end", ENDED_WITHIN, || async { running().await == 0 }).await;
    Ok(())
}
