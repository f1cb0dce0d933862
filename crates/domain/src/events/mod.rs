//! Events: the [`Event`] itself, the kinds, and the stable event id of a message. Used by the engine, which records
//! events, and by the gateway, which filters them for observers.

mod event;
pub mod event_id;
pub mod kind;

pub use event::{Event, EventBody};

/// Position in the event log of a workspace. The first event is 1; 0 means "none yet".
pub type EventSeq = i64;
