//! File metadata ([`metadata`]), called by the engine, and the stored objects with their contents, called by the
//! engine's uploads and by the worker's removal loop. Main types: `NewFile`, `Completion`, `FileObject`.

pub mod metadata;
pub(crate) mod objects;
