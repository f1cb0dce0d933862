//! Channels, conversations and the audiences that sends are resolved from.

pub mod all_conversations;
pub(crate) mod audiences;
pub mod conversations;
pub mod lifecycle;
