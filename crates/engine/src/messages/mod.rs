//! Messages: posting, the group committer, publishing, reading, editing, reactions and webhooks. Handle: [`Messages`].
//! A [`posting::Draft`] goes through `committer::CommitQueue` to `publisher::Publisher`.

mod addresses;
pub(crate) mod committer;
pub mod edits;
pub(crate) mod fanouts;
#[cfg(test)]
pub(crate) mod fixture;
mod groups;
pub mod history;
mod node_posts;
pub mod outbox_relay;
pub mod posting;
pub(crate) mod publisher;
pub mod reactions;
pub mod read_models;
pub mod receipts;
pub mod webhooks;

use std::sync::Arc;

use relay_stream::Stream;

use crate::{
    access::limits::QuotaCache,
    channels::{Channels, audiences::Audiences},
    core::Core,
    files::Files,
    workspaces::suspensions::Suspensions,
};

/// Handle of messages, reactions, receipts and webhooks.
#[derive(Clone)]
pub struct Messages {
    pub(crate) core: Core,
    pub(crate) quotas: QuotaCache,
    pub(crate) files: Files,
    pub(crate) suspensions: Arc<Suspensions>,
    pub(crate) audiences: Arc<Audiences>,
    pub(crate) channels: Channels,
    pub(crate) stream: Stream,
    pub(crate) committer: Arc<committer::CommitQueue>,
}
