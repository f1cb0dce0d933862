//! Messages to send over REST, prepared so that sending costs little.

use std::sync::Arc;

use anyhow::Result;
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
    let pairs = receivers.iter().zip(senders.iter().cycle());
    let post = |(receiver, sender): (&Agent, &Agent)| Post {
        path: "/v1/dm".into(),
        token: sender.token.clone(),
        head: format!(r#"{{"to":"{}","text":""#, receiver.name),
    };
    sender(workspace, pairs.map(post).collect(), size)
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

fn sender(workspace: &Workspace, posts: Arc<[Post]>, size: usize) -> impl Sender + use<> {
    let workspace = workspace.clone();
    move |number, stamp| {
        let (workspace, posts) = (workspace.clone(), Arc::clone(&posts));
        async move {
            let post = &posts[number as usize % posts.len()];
            let mut body = String::with_capacity(post.head.len() + size + 2);
            body.push_str(&post.head);
            push_text(&mut body, stamp, size);
            body.push_str("\"}");
            let pool = workspace.pool(spread(number));
            pool.post(&post.path, Some(&post.token), &body).await?.success()?;
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
