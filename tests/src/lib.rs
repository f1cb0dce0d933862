//! What the acceptance tests share beside the testkit.

pub mod raw;
