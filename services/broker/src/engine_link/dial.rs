//! Opens the node socket: TCP, TLS where the URL asks for it, WebSocket.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{self, client::IntoClientRequest as _, error::UrlError, http, protocol::WebSocketConfig},
};

/// Largest frame of the engine.
// Above the engine's largest frame, a `deliver` of 900 KiB.
const MAX_FRAME: usize = 1 << 20;

/// Bytes of a connection, encrypted or not.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

pub(super) type Socket = WebSocketStream<Box<dyn Transport>>;

/// Opens a WebSocket to `url` with a bearer token.
pub(super) async fn dial(url: &str, token: &str) -> Result<Socket, tungstenite::Error> {
    let mut request = url.into_client_request()?;
    let bearer = http::HeaderValue::from_str(&format!("Bearer {token}"))?;
    request.headers_mut().insert(http::header::AUTHORIZATION, bearer);
    // An IPv6 address has brackets in a URL, and none for the resolver and for TLS.
    let host = request.uri().host().ok_or(UrlError::NoHostName)?.trim_matches(['[', ']']).to_owned();
    let is_encrypted = request.uri().scheme_str() == Some("wss");
    let port = request.uri().port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    // Acks are small frames, which Nagle's algorithm would hold back.
    stream.set_nodelay(true)?;
    let transport: Box<dyn Transport> =
        if is_encrypted { Box::new(encrypt(host, stream).await?) } else { Box::new(stream) };
    let config = WebSocketConfig::default().max_message_size(Some(MAX_FRAME)).max_frame_size(Some(MAX_FRAME));
    let (socket, _) = client_async_with_config(request, transport, Some(config)).await?;
    Ok(socket)
}

async fn encrypt(host: String, stream: TcpStream) -> io::Result<impl Transport> {
    let name = ServerName::try_from(host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    // Reads many files at the first connection.
    let config = tokio::task::spawn_blocking(tls_config).await.map_err(io::Error::other)?;
    TlsConnector::from(config).connect(name, stream).await
}

/// Trusts the machine's certificates. They are read once unless there are none, so that a set that is installed later
/// is found.
fn tls_config() -> Arc<ClientConfig> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(known) = CONFIG.get() {
        return known.clone();
    }
    let mut roots = RootCertStore::empty();
    // Certificates that cannot be read are left out; without any the handshake fails with its reason.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let is_complete = !roots.is_empty();
    let config = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());
    if is_complete { CONFIG.get_or_init(|| config).clone() } else { config }
}
