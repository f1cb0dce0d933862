//! Direct messages in batches: each sender posts what waits for it, in one request at a time.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use futures::FutureExt;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};

use crate::api::{Agent, Workspace};
use crate::payload::push_text;
use crate::posts::Sender;

/// Message that waits for a batch.
struct Waiting {
    post: String,
    outcome: oneshot::Sender<Result<(), String>>,
}

#[derive(Deserialize)]
struct Answer {
    data: Outcomes,
}

#[derive(Deserialize)]
struct Outcomes {
    outcomes: Vec<Outcome>,
}

#[derive(Deserialize)]
struct Outcome {
    status: Option<u16>,
}

/// Sends a direct message to each receiver in turn, always from the same sender to the same receiver, in batches of up
/// to `posts`.
pub(crate) fn batched_messages(
    workspace: &Workspace,
    senders: &[Agent],
    receivers: &[Agent],
    size: usize,
    posts: usize,
) -> impl Sender + use<> {
    let queues = senders.iter().enumerate().map(|(turn, sender)| {
        let (queue, waiting) = mpsc::channel(4 * posts);
        tokio::spawn(post_batches(workspace.clone(), turn, sender.token.clone(), waiting, posts));
        queue
    });
    let queues: Arc<[mpsc::Sender<Waiting>]> = queues.collect();
    let names: Arc<[String]> = receivers.iter().map(|receiver| receiver.name.clone()).collect();
    move |number, stamp| {
        let (queues, names) = (Arc::clone(&queues), Arc::clone(&names));
        async move {
            let receiver = number % names.len();
            let mut post = format!(r#"{{"to":"{}","text":""#, names[receiver]);
            push_text(&mut post, stamp, size);
            post.push_str("\"}");
            let (outcome, answer) = oneshot::channel();
            let queue = &queues[receiver % queues.len()];
            queue.send(Waiting { post, outcome }).await.map_err(|_| anyhow!("the sender has ended"))?;
            answer.await.context("the sender has ended")?.map_err(|error| anyhow!(error))
        }
        .boxed()
    }
}

/// Posts the messages of one sender until the queue takes no more.
async fn post_batches(
    workspace: Workspace,
    turn: usize,
    token: String,
    mut queue: mpsc::Receiver<Waiting>,
    posts: usize,
) {
    let mut waiting = Vec::with_capacity(posts);
    while queue.recv_many(&mut waiting, posts).await > 0 {
        let batch: Vec<Waiting> = std::mem::take(&mut waiting);
        let texts: Vec<&str> = batch.iter().map(|one| one.post.as_str()).collect();
        let body = format!(r#"{{"messages":[{}]}}"#, texts.join(","));
        let statuses = post_batch(&workspace, turn, &token, &body).await.map_err(|error| format!("{error:#}"));
        for (nth, one) in batch.into_iter().enumerate() {
            let outcome = match &statuses {
                Ok(statuses) if statuses.get(nth) == Some(&Some(201)) => Ok(()),
                Ok(statuses) => Err(format!("a post was answered {:?}", statuses.get(nth))),
                Err(error) => Err(error.clone()),
            };
            let _ = one.outcome.send(outcome);
        }
    }
}

async fn post_batch(workspace: &Workspace, turn: usize, token: &str, body: &str) -> Result<Vec<Option<u16>>> {
    let answer = workspace.pool(turn).post("/v1/messages/batch", Some(token), body).await?.success()?;
    let answer: Answer = serde_json::from_slice(&answer.body).context("the answer to a batch")?;
    Ok(answer.data.outcomes.into_iter().map(|outcome| outcome.status).collect())
}
