//! Channels and direct-message conversations: creation, members, lists, and the [`audience::Audience`] of a post.
//! Called by the engine.

pub(crate) mod all_conversations;
pub mod audience;
pub(crate) mod conversations;
pub(crate) mod lifecycle;
pub(crate) mod members;
