//! Messages: the batch commit that writes them with their deliveries ([`batch`], `commit_at_once`), reading, editing,
//! reactions, read state, inbound webhooks, the outbox and retention. Main types: `Batch` with its `NewSend`s and
//! their `SendOutcome`s, `MessageChange`, `UnpublishedBatch`. Called by the engine and by the worker's loops.

pub mod batch;
pub(crate) mod commit_at_once;
pub(crate) mod commit_facts;
pub(crate) mod commit_in_steps;
pub(crate) mod commit_write;
pub(crate) mod contents;
pub(crate) mod days;
pub(crate) mod edits;
pub mod fanout_chunks;
pub mod fanouts;
pub mod outbox;
pub mod pages;
pub(crate) mod queries;
pub(crate) mod reactions;
pub mod read_folding;
pub mod read_state;
pub(crate) mod reads;
pub(crate) mod receipts;
pub mod retention;
pub(crate) mod row;
pub(crate) mod update;
pub mod webhooks;
