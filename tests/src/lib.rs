//! What the acceptance tests share beside the testkit.

pub mod chaos;
pub mod clients;
pub mod raw;
