//! Full-text search of messages: the index, which the worker fills ([`index::IndexStep`]), and the queries over it,
//! which the engine calls ([`queries::SearchQuery`]).

pub mod index;
pub mod queries;
mod wanted;
