//! mentions.
