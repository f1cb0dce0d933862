//! Events: their kinds, and the stable event id of a message. Used by the engine, which records events, and by the
//! gateway, which filters them for observers.

pub mod event_id;
pub mod kind;
