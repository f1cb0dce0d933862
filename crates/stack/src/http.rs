//! HTTP clients of tests and tools.

use std::sync::Once;

/// Returns a client builder, after installing `ring` as the TLS provider of the process, because the workspace's HTTP
/// client has none.
pub fn client() -> reqwest::ClientBuilder {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // Fails if a provider is installed already, which is then used.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    reqwest::Client::builder().no_proxy()
}
