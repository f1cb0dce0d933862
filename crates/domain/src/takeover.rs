//! takeover.
