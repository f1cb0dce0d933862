//! TLS configuration of the client: certificates are verified against the root certificates of the machine or, if it
//! has none (a bare image), against Mozilla's. `SSL_CERT_FILE` and `SSL_CERT_DIR` select others.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore, crypto::ring};
use tokio_rustls::TlsConnector;

pub(crate) fn connector() -> TlsConnector {
    let mut roots = RootCertStore::empty();
    // Certificates that cannot be read are left out: a broken one of the machine must not prevent all calls.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let versions = builder.with_safe_default_protocol_versions();
    // Fails only for a provider without cipher suites for a version; ring has suites for both.
    let builder = versions.expect("ring speaks TLS 1.2 and 1.3");
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    // The only version of HTTP that the client speaks.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsConnector::from(Arc::new(config))
}
