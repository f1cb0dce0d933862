//! The private servers, seen by the drivers that the engine uses.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use relay_testkit::servers::{Nats, Postgres};
use sqlx::{Connection, PgConnection};

#[tokio::test]
async fn a_cluster_keeps_its_port_and_data_over_a_stop_and_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let postgres = Postgres::start(dir.path()).await.unwrap();
    let url = postgres.create_database("relay").await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let encoding: String = sqlx::query_scalar("show server_encoding").fetch_one(&mut connection).await.unwrap();
    assert_eq!(encoding, "UTF8");
    sqlx::query("create table t (x text)").execute(&mut connection).await.unwrap();

    postgres.restart().await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("insert into t values ('kept')").execute(&mut connection).await.unwrap();

    postgres.kill9();
    postgres.restart().await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let kept: String = sqlx::query_scalar("select x from t").fetch_one(&mut connection).await.unwrap();
    assert_eq!(kept, "kept");
    assert_eq!(postgres.create_database("relay").await.unwrap(), url);
    postgres.stop().await.unwrap();
}

#[tokio::test]
async fn a_stream_keeps_its_messages_over_a_stop_and_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path()).await.unwrap();
    let jetstream = async_nats::jetstream::new(async_nats::connect(nats.url()).await.unwrap());
    let config =
        async_nats::jetstream::stream::Config { name: "T".into(), subjects: vec!["t.>".into()], ..Default::default() };
    jetstream.create_stream(config).await.unwrap();
    jetstream.publish("t.1", "one".into()).await.unwrap().await.unwrap();
    nats.restart().await.unwrap();
    nats.kill9();
    nats.restart().await.unwrap();
    let jetstream = async_nats::jetstream::new(async_nats::connect(nats.url()).await.unwrap());
    let mut stream = jetstream.get_stream("T").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 1);
    nats.stop().await.unwrap();
    assert!(!nats.is_running());
}

#[tokio::test]
async fn servers_that_the_environment_names_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let (database_dir, stream_dir) = (dir.path().join("postgres"), dir.path().join("nats"));
    let (postgres, nats) = tokio::try_join!(Postgres::start(&database_dir), Nats::start(&stream_dir)).unwrap();
    relay_testkit::servers::check_postgres(&postgres.url()).await.unwrap();
    relay_testkit::servers::check_nats(&nats.url()).await.unwrap();
    let url = postgres.create_database("ascii").await.unwrap();
    let mut connection = PgConnection::connect(&postgres.url()).await.unwrap();
    for statement in ["drop database ascii", "create database ascii encoding 'SQL_ASCII' template template0"] {
        sqlx::query(statement).execute(&mut connection).await.unwrap();
    }
    let refusal = relay_testkit::servers::check_postgres(&url).await.unwrap_err().to_string();
    assert!(refusal.contains("SQL_ASCII"), "{refusal}");
    let refusal = relay_testkit::servers::check_nats(&postgres.address()).await.unwrap_err();
    assert!(format!("{refusal:#}").contains("no greeting"), "{refusal:#}");
}
