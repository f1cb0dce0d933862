//! relay-loadtest.

fn main() {}
