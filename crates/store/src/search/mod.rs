//! Full-text search of messages: the index, which the worker fills, and the queries over it, which the engine calls.

pub mod index;
pub mod queries;
mod wanted;
