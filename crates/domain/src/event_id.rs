//! event_id.
