//! relay-stream.
