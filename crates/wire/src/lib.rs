//! relay-wire.
