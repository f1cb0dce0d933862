//! relay-runtime.
