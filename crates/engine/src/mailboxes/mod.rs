//! Mailboxes: serving them on sockets, listing and settling deliveries, claims and dead letters. Handle: [`Mailboxes`].
//! Main types: [`serving::RepairedMailbox`], [`claims::ClaimedDelivery`], [`dead_letters::DeadLetterQuery`], and
//! `cursors::CursorMoves`, which gathers acks.

pub(crate) mod claim_waits;
pub mod claims;
pub(crate) mod cursors;
pub mod dead_letters;
pub mod deliveries;
pub mod expiry;
pub mod inbox;
pub mod insight;
pub mod positions;
pub mod redrives;
pub mod serving;
pub(crate) mod unread;

use std::sync::Arc;

use relay_stream::Stream;

use crate::core::Core;

/// Handle of mailboxes.
#[derive(Clone)]
pub struct Mailboxes {
    pub(crate) core: Core,
    pub(crate) stream: Stream,
    pub(crate) cursors: Arc<cursors::CursorMoves>,
    pub(crate) claim_waits: Arc<claim_waits::ClaimWaits>,
    pub(crate) unread: unread::UnreadCache,
}
