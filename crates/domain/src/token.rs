//! token.
