//! Requests that execute statements of their own, as often as a client likes: they take a few database connections of a
//! gateway, not all.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use futures::future::{join_all, try_join_all};
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::Stack,
};
use reqwest::Method;
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

use super::register_others;

/// Requests at a time: four for each database connection of a gateway.
const AT_A_TIME: usize = 64;
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_posts_leave_connections_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "attacker").await?;
    let eve = key.as_agent(&key.register_agent("eve").await?).without_retries();
    let other = Api::create_workspace(gateway, "other").await?.without_retries();
    let post = || async {
        let (body, header) = (json!({ "text": "once" }), [("idempotency-key", "same-key")]);
        eve.call(Method::POST, "/v1/channels/general/messages", Some(body), &header).await
    };
    post().await?.success()?;
    // The message that answers a repetition is read with its reactions; registrations have none.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("LOCK TABLE message_reactions IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await?;

    let is_over = AtomicBool::new(false);
    let attack = join_all((0..AT_A_TIME).map(|_| async {
        while !is_over.load(Ordering::Relaxed) {
            let _ = post().await;
        }
    }));
    let (_, others) = tokio::join!(attack, register_others(&other, transaction, &is_over));
    others
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_frames_leave_connections_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "attacker").await?;
    let other = Api::create_workspace(gateway, "other").await?.without_retries();
    let sockets = try_join_all((0..AT_A_TIME).map(|nth| {
        let key = &key;
        async move {
            let (id, name) = (format!("node_{nth}"), format!("node-{nth}"));
            let node = key.create_broker_node(&id, &name).await?;
            let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
            socket.register_broker(&id, &name, "attacker").await?;
            anyhow::Ok(socket)
        }
    }))
    .await?;
    // An agent is registered under a share of its provider's row.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("SELECT FROM providers FOR UPDATE").execute(&mut *transaction).await?;

    let is_over = AtomicBool::new(false);
    let attack = join_all(sockets.into_iter().enumerate().map(|(nth, mut socket)| {
        let is_over = &is_over;
        async move {
            while !is_over.load(Ordering::Relaxed) {
                // Refused once the statement has waited for the lock for 2 s.
                if socket.register_agent(&format!("worker-{nth}")).await.is_err() {
                    break;
                }
            }
        }
    }));
    let (_, others) = tokio::join!(attack, register_others(&other, transaction, &is_over));
    others
}
