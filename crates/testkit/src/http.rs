//! HTTP clients of the tests and tools.

use std::sync::Once;

/// A client to build. The workspace's HTTP client has no TLS provider of its own: `ring` is installed for the
/// process first.
pub fn client() -> reqwest::ClientBuilder {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // Fails only when somebody has installed one before, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    reqwest::Client::builder().no_proxy()
}
