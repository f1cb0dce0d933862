//! Version of the broker, as clients and the engine see it.

/// Version of this build.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Version as engines read it: they treat nodes by the prefix.
pub(crate) fn wire() -> String {
    format!("relay-broker/{VERSION}")
}
