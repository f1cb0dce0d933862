//! Cargo resolves build-dependencies only for packages with a build script.

fn main() {}
