//! Dependencies of the whole workspace with all features that any crate of it asks for. Contains no code.
