//! relay-worker.

fn main() {}
