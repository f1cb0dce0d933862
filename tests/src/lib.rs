//! relay-acceptance.
