//! Messages to send over REST, prepared so that sending costs little.

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
    /// The body up to the text.
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

/// Takes the request's number and the stamp for its text.
pub(crate) trait Sender: Fn(u64, u64) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + 'static {}
impl<F> Sender for F where F: Fn(u64, u64) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + 'static {}

/// One direct message to each receiver in turn, always from the same sender to the same receiver.
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

/// What a published client waits before its second, third and fourth try: the shortest of the three clients' (Python's).
const CLIENT_PAUSES: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];

/// The gateways that requests are led to, as a proxy would: to one after the other, but for the one that is away.
#[derive(Debug)]
pub(crate) struct Front {
    workspace: Workspace,
    away: AtomicUsize,
    /// Answers of 5xx.
    pub(crate) server_errors: AtomicU64,
    /// Requests without an answer.
    pub(crate) no_answers: AtomicU64,
}

impl Front {
    /// Before all gateways of the workspace.
    pub(crate) fn new(workspace: &Workspace) -> Arc<Self> {
        let (server_errors, no_answers) = Default::default();
        Arc::new(Self { workspace: workspace.clone(), away: AtomicUsize::new(usize::MAX), server_errors, no_answers })
    }

    /// Leads to this one no more, or to all again.
    pub(crate) fn leave_out(&self, gateway: Option<usize>) {
        self.away.store(gateway.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Posts as a client does: with a key, and again after a 5xx or no answer, four times at most.
    async fn post(&self, turn: usize, post: &Post, key: &str, body: &str) -> Result<()> {
        let mut pauses = CLIENT_PAUSES.iter();
        for try_no in 0.. {
            let pool = self.workspace.pool_but(turn + try_no, self.away.load(Ordering::Relaxed));
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
                None => return met.context("given up after four tries"),
            }
        }
        Ok(())
    }
}

/// As [`direct_messages`], by clients that try again.
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
            let post = &posts[number as usize % posts.len()];
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
            let post = &posts[number as usize % posts.len()];
            let pool = workspace.pool(spread(number));
            pool.post(&post.path, Some(&post.token), &post.body(stamp, size)).await?.success()?;
            Ok(())
        }
        .boxed()
    }
}

/// Neither in step with the posts nor with the gateways that the receivers' sockets are on.
fn spread(number: u64) -> usize {
    (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_posts_of_one_pair_go_through_all_gateways() {
        for pair in 0..100_u64 {
            let second = (0..100).filter(|round| spread(pair + round * 100) % 2 == 1).count();
            assert!((25..=75).contains(&second), "pair {pair}: {second} of 100");
        }
    }
}
