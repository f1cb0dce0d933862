//! relay-gateway.

fn main() {}
