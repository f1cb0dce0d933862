//! Message search.

pub mod queries;
