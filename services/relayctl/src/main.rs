//! relayctl.

fn main() {}
