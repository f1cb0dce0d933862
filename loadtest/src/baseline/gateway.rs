//! Baseline gateway: the least that a gateway with durable sends has to do, in one process, started by
//! `relay-loadtest baseline-gateway`.
//!
//! A POST is parsed, committed with others by one Postgres statement (counter of the agent, message, delivery),
//! published on the agent's JetStream subject, and answered when JetStream has stored it. The stream republishes it to
//! the agent's WebSocket. Acks are written every 250 ms. There are no tenants, tokens, limits, keys, events or metrics.
//!
//! `GET /v1/rows/{bytes}` answers one row, found by its primary key, of any length.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use async_nats::jetstream;
use async_nats::jetstream::context::PublishAckFuture;
use async_nats::jetstream::stream::{Config, Republish, StorageType};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

/// Requests of one statement at most, as in the engine.
const BATCH: usize = 512;
const QUEUE: usize = 8192;
/// Interval in which acks are written.
const ACKS_EVERY: Duration = Duration::from_millis(250);
const STREAM: &str = "BASELINE";

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS heads (agent text PRIMARY KEY, next_seq bigint NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS cursors (agent text PRIMARY KEY, acked bigint NOT NULL);
CREATE TABLE IF NOT EXISTS messages (id bigint PRIMARY KEY, text text NOT NULL);
CREATE TABLE IF NOT EXISTS deliveries (agent text, seq bigint, message_id bigint NOT NULL, PRIMARY KEY (agent, seq));
CREATE TABLE IF NOT EXISTS rows (id bigint PRIMARY KEY, letter text NOT NULL);
INSERT INTO rows VALUES (1, 'x') ON CONFLICT DO NOTHING;";

/// Counts the agents' mailboxes up and writes messages and deliveries; returns a seq per request.
const COMMIT: &str = "
WITH new AS (
    SELECT *, row_number() OVER (PARTITION BY agent ORDER BY id) AS nth
      FROM unnest($1::text[], $2::bigint[], $3::text[]) AS n (agent, id, text)
), heads_before AS (
    INSERT INTO heads AS h (agent, next_seq) SELECT agent, 1 + count(*) FROM new GROUP BY agent ORDER BY agent
    ON CONFLICT (agent) DO UPDATE SET next_seq = h.next_seq + excluded.next_seq - 1
    RETURNING h.agent, h.next_seq
), sizes AS (
    SELECT agent, count(*) AS size FROM new GROUP BY agent
), numbered AS (
    SELECT n.*, h.next_seq - s.size + n.nth - 1 AS seq
      FROM new n JOIN heads_before h USING (agent) JOIN sizes s USING (agent)
), stored AS (
    INSERT INTO messages (id, text) SELECT id, text FROM numbered
), delivered AS (
    INSERT INTO deliveries (agent, seq, message_id) SELECT agent, seq, id FROM numbered
)
SELECT id, seq FROM numbered";

const WRITE_ACKS: &str = "
INSERT INTO cursors (agent, acked) SELECT * FROM unnest($1::text[], $2::bigint[])
    ON CONFLICT (agent) DO UPDATE SET acked = excluded.acked";

#[derive(Clone)]
struct Gateway {
    pool: PgPool,
    commits: mpsc::Sender<Pending>,
    next_id: Arc<AtomicI64>,
    nats: async_nats::Client,
    acks: Arc<Mutex<HashMap<String, i64>>>,
}

struct Pending {
    to: String,
    id: i64,
    text: String,
    published: oneshot::Sender<PublishAckFuture>,
}

/// Serves until the process ends. Prints the address that it listens on.
pub(crate) async fn serve(database: &str, nats: &str) -> Result<()> {
    let options: PgConnectOptions = database.parse()?;
    let pool = PgPoolOptions::new().max_connections(4).connect_with(options).await?;
    sqlx::raw_sql(SCHEMA).execute(&pool).await.context("create the tables")?;
    let nats = async_nats::connect(nats).await?;
    let stream = jetstream::new(nats.clone());
    let config = Config {
        name: STREAM.to_owned(),
        subjects: vec!["b.*".to_owned()],
        storage: StorageType::File,
        republish: Some(Republish {
            source: "b.*".into(),
            destination: "live.b.{{wildcard(1)}}".into(),
            headers_only: false,
        }),
        ..Config::default()
    };
    let _ = stream.delete_stream(STREAM).await;
    stream.create_stream(config).await.context("create the stream")?;

    let (commits, queue) = mpsc::channel(QUEUE);
    let gateway = Gateway { pool: pool.clone(), commits, next_id: Arc::default(), nats, acks: Arc::default() };
    tokio::spawn(commit_batches(pool.clone(), stream, queue));
    tokio::spawn(write_acks(pool, Arc::clone(&gateway.acks)));
    let routes = Router::new()
        .route("/v1/dm", post(send))
        .route("/v1/node/ws", get(connect))
        .route("/v1/rows/{bytes}", get(read))
        .with_state(gateway);
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    println!("http://{}", listener.local_addr()?);
    axum::serve(listener, routes.into_make_service()).await?;
    Ok(())
}

#[derive(Deserialize)]
struct Post {
    to: String,
    text: String,
}

async fn send(State(gateway): State<Gateway>, Json(body): Json<Post>) -> Result<(StatusCode, Json<Value>), StatusCode> {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    let id = gateway.next_id.fetch_add(1, Ordering::Relaxed);
    let (published, committed) = oneshot::channel();
    let pending = Pending { to: body.to, id, text: body.text.clone(), published };
    gateway.commits.try_send(pending).map_err(|_| unavailable)?;
    committed.await.map_err(|_| unavailable)?.await.map_err(|_| unavailable)?;
    Ok((StatusCode::CREATED, Json(json!({"ok": true, "data": {"id": id, "text": body.text}}))))
}

async fn read(State(gateway): State<Gateway>, Path(bytes): Path<i32>) -> Result<Json<Value>, StatusCode> {
    let row = sqlx::query_scalar::<_, String>("SELECT repeat(letter, $1) FROM rows WHERE id = 1").bind(bytes);
    let text = row.fetch_one(&gateway.pool).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(Json(json!({"ok": true, "data": text})))
}

/// Commits the requests that arrived during the previous commit, and publishes them in the order of their seqs.
async fn commit_batches(pool: PgPool, stream: jetstream::Context, mut queue: mpsc::Receiver<Pending>) {
    let mut batch = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let agents: Vec<&str> = batch.iter().map(|one| one.to.as_str()).collect();
        let ids: Vec<i64> = batch.iter().map(|one| one.id).collect();
        let texts: Vec<&str> = batch.iter().map(|one| one.text.as_str()).collect();
        let rows = sqlx::query_as::<_, (i64, i64)>(COMMIT).bind(&agents).bind(&ids).bind(&texts).fetch_all(&pool).await;
        // Without rows the senders are dropped, and their requests answered with 503.
        let seqs: HashMap<i64, i64> = rows.unwrap_or_default().into_iter().collect();
        batch.sort_unstable_by_key(|one| one.id);
        for one in batch.drain(..) {
            let Some(seq) = seqs.get(&one.id) else { continue };
            let payload = json!({"id": one.id, "text": one.text});
            let frame = json!({"v": 1, "type": "deliver", "agent": one.to, "seq": seq, "payload": payload});
            let published = stream.publish(format!("b.{}", one.to), frame.to_string().into()).await;
            let _ = published.map(|stored| one.published.send(stored));
        }
    }
}

async fn write_acks(pool: PgPool, acks: Arc<Mutex<HashMap<String, i64>>>) {
    let mut ticks = tokio::time::interval(ACKS_EVERY);
    loop {
        ticks.tick().await;
        let taken = std::mem::take(&mut *acks.lock().unwrap_or_else(PoisonError::into_inner));
        if taken.is_empty() {
            continue;
        }
        let (agents, seqs): (Vec<String>, Vec<i64>) = taken.into_iter().unzip();
        let _ = sqlx::query(WRITE_ACKS).bind(&agents).bind(&seqs).execute(&pool).await;
    }
}

#[derive(Deserialize)]
struct Connect {
    /// Name of the agent, in the place of the engine's token.
    token: String,
}

async fn connect(State(gateway): State<Gateway>, Query(query): Query<Connect>, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(move |socket| async move {
        let _ = serve_socket(gateway, query.token, socket).await;
    })
}

#[derive(Deserialize)]
struct Received<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    id: Option<&'a str>,
    up_to_seq: Option<i64>,
}

async fn serve_socket(gateway: Gateway, agent: String, mut socket: WebSocket) -> Result<()> {
    let mut live = gateway.nats.subscribe(format!("live.b.{agent}")).await?;
    gateway.nats.flush().await?;
    loop {
        tokio::select! {
            frame = live.next() => {
                let frame = frame.context("the subscription ended")?;
                socket.send(Message::Text(frame.payload.try_into()?)).await?;
            }
            received = socket.recv() => {
                let Message::Text(text) = received.context("the socket ended")?? else { continue };
                let received: Received<'_> = serde_json::from_str(&text)?;
                if let (Some(id), "node.register") = (received.id, received.kind) {
                    let reply = json!({"v": 1, "id": id, "type": "reply", "ok": true, "data": {}});
                    socket.send(Message::Text(reply.to_string().into())).await?;
                }
                if let Some(seq) = received.up_to_seq {
                    gateway.acks.lock().unwrap_or_else(PoisonError::into_inner).insert(agent.clone(), seq);
                }
            }
        }
    }
}
