//! Messages to send over REST, prepared so that sending is cheap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::api::{Agent, Workspace};
use crate::payload::push_text;

struct Post {
    path: String,
    token: String,
    /// Body up to the text.
    head: String,
}

impl Post {
    fn body(&self, stamp: u64, size: usize) -> String {
        let mut body = String::with_capacity(self.head.len() + size + 2);
        body.push_str(&self.head);
        push_text(&mut body, stamp, size);
        body.push_str("\"}");
        body
    }
}

/// Sends one request, given its number and the timestamp for its text.
pub(crate) trait Sender:
    Fn(usize, u64) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + 'static
{
}
impl<F> Sender for F where F: Fn(usize, u64) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + 'static {}

/// Sends a direct message to each receiver in turn, always from the same sender to the same receiver.
pub(crate) fn direct_messages(
    workspace: &Workspace,
    senders: &[Agent],
    receivers: &[Agent],
    size: usize,
) -> impl Sender + use<> {
    sender(workspace, direct_posts(senders, receivers).into(), size)
}

fn direct_posts(senders: &[Agent], receivers: &[Agent]) -> Vec<Post> {
    let pairs = receivers.iter().zip(senders.iter().cycle());
    let post = |(receiver, sender): (&Agent, &Agent)| Post {
        path: "/v1/dm".into(),
        token: sender.token.clone(),
        head: format!(r#"{{"to":"{}","text":""#, receiver.name),
    };
    pairs.map(post).collect()
}

/// Posts into `channels` in turn, by the owner of each.
pub(crate) fn channel_posts(workspace: &Workspace, channels: &[(String, Agent)], size: usize) -> impl Sender + use<> {
    let post = |(channel, owner): &(String, Agent)| Post {
        path: format!("/v1/channels/{channel}/messages"),
        token: owner.token.clone(),
        head: r#"{"text":""#.into(),
    };
    sender(workspace, channels.iter().map(post).collect(), size)
}

/// Delays of published clients before the second, third and fourth attempt; the shortest of the three clients (Python).
const CLIENT_PAUSES: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];

/// Round-robin selection of gateways like a load balancer, except one that is being restarted.
#[derive(Debug)]
pub(crate) struct Front {
    workspace: Workspace,
    excluded: AtomicUsize,
    /// Number of 5xx answers.
    pub(crate) server_errors: AtomicU64,
    /// Number of requests without an answer.
    pub(crate) no_answers: AtomicU64,
}

impl Front {
    /// Creates a front for all gateways of the workspace.
    pub(crate) fn new(workspace: &Workspace) -> Arc<Self> {
        let excluded = AtomicUsize::new(usize::MAX);
        let (server_errors, no_answers) = Default::default();
        Arc::new(Self { workspace: workspace.clone(), excluded, server_errors, no_answers })
    }

    /// Excludes a gateway, or includes all again.
    pub(crate) fn leave_out(&self, gateway: Option<usize>) {
        self.excluded.store(gateway.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Posts like a client: with an idempotency key, and again after a 5xx or no answer, up to four attempts.
    async fn post(&self, turn: usize, post: &Post, key: &str, body: &str) -> Result<()> {
        let mut pauses = CLIENT_PAUSES.iter();
        for attempt in 0.. {
            let pool = self.workspace.pool_but(turn + attempt, self.excluded.load(Ordering::Relaxed));
            let met = match pool.post_keyed(&post.path, &post.token, key, body).await {
                Ok(answer) if answer.status < 500 => return answer.success().map(drop),
                Ok(answer) => {
                    self.server_errors.fetch_add(1, Ordering::Relaxed);
                    answer.success().map(drop)
                }
                Err(error) => {
                    self.no_answers.fetch_add(1, Ordering::Relaxed);
                    Err(error)
                }
            };
            match pauses.next() {
                Some(pause) => tokio::time::sleep(*pause).await,
                None => return met.context("given up after four attempts"),
            }
        }
        Ok(())
    }
}

/// Sends as [`direct_messages`] does, with the retries of a client.
pub(crate) fn direct_messages_as_client(
    front: &Arc<Front>,
    senders: &[Agent],
    receivers: &[Agent],
    size: usize,
) -> impl Sender + use<> {
    let posts: Arc<[Post]> = direct_posts(senders, receivers).into();
    let front = Arc::clone(front);
    move |number, stamp| {
        let (front, posts) = (Arc::clone(&front), Arc::clone(&posts));
        async move {
            let post = &posts[number % posts.len()];
            front.post(spread(number), post, &format!("{number}-{stamp}"), &post.body(stamp, size)).await
        }
        .boxed()
    }
}

fn sender(workspace: &Workspace, posts: Arc<[Post]>, size: usize) -> impl Sender + use<> {
    let workspace = workspace.clone();
    move |number, stamp| {
        let (workspace, posts) = (workspace.clone(), Arc::clone(&posts));
        async move {
            let post = &posts[number % posts.len()];
            let pool = workspace.pool(spread(number));
            pool.post(&post.path, Some(&post.token), &post.body(stamp, size)).await?.success()?;
            Ok(())
        }
        .boxed()
    }
}

/// Returns a number that correlates neither with the posts nor with the gateways of the receivers' sockets.
fn spread(number: usize) -> usize {
    ((number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_posts_of_one_pair_go_through_all_gateways() {
        for pair in 0..100 {
            let second = (0..100).filter(|round| spread(pair + round * 100) % 2 == 1).count();
            assert!((25..=75).contains(&second), "pair {pair}: {second} of 100");
        }
    }
}
