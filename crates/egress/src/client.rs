//! One POST to one tenant's URL.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::{
    Connect, Policy, Refusal, Resolve, SystemResolver, Target, TcpConnector,
    pool::{Connection, Place, Pool},
    tls,
};

/// What one call may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From asking for the host's addresses to the last byte of the answer that is read.
    pub timeout: Duration,
    /// For one TCP connection; the next address is tried after it.
    pub connect_timeout: Duration,
    /// Addresses of a host that are tried, after all were judged.
    pub addresses: usize,
    /// Status line and headers of an answer, in bytes; not below 8192.
    pub head_bytes: usize,
    /// What is read of an answer's body, in bytes.
    pub body_bytes: usize,
}

impl Default for Limits {
    /// The contract's 10 s (node.md 13.2), and small answers.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(3),
            addresses: 4,
            head_bytes: 16 * 1024,
            body_bytes: 64 * 1024,
        }
    }
}

/// What is different for one call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Instead of [`Limits::timeout`].
    pub timeout: Option<Duration>,
}

/// What a receiver answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status. Redirects come back as they are.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, up to [`Limits::body_bytes`].
    pub body: Bytes,
    /// Whether the body was longer.
    pub is_truncated: bool,
    /// How long all of it took.
    pub latency: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The URL or an address of its host is not to be called. Nothing was sent.
    #[error("not called: {0}")]
    Refused(#[from] Refusal),
    /// It took too long. It may have been received.
    #[error("no complete answer in time")]
    Timeout,
    /// The host has no address, or nothing listens there, or TLS failed. Nothing was sent.
    #[error("no connection")]
    Connect(#[source] io::Error),
    /// The connection broke, or what came back was no HTTP. It may have been received.
    #[error("no valid answer")]
    Protocol(#[source] hyper::Error),
    /// The head of the answer was larger than is read. It was received.
    #[error("the answer's headers are too large")]
    TooLarge,
}

/// Calls tenants' URLs. Clones share their connections.
#[derive(Clone)]
pub struct Client<R = SystemResolver, C = TcpConnector> {
    inner: Arc<Inner<R, C>>,
}

struct Inner<R, C> {
    policy: Policy,
    limits: Limits,
    resolver: R,
    connector: C,
    tls: TlsConnector,
    pool: Arc<Pool>,
}

impl Client {
    /// A client over the resolver of the system and TCP. Reads the root certificates of the machine.
    #[must_use]
    pub fn new(policy: Policy, limits: Limits) -> Self {
        Self::over(policy, limits, SystemResolver::default(), TcpConnector)
    }
}

impl<R: Resolve, C: Connect> Client<R, C> {
    /// A client over a resolver and a connector of the caller's.
    #[must_use]
    pub fn over(policy: Policy, limits: Limits, resolver: R, connector: C) -> Self {
        let inner = Inner { policy, limits, resolver, connector, tls: tls::connector(), pool: Arc::default() };
        Self { inner: Arc::new(inner) }
    }

    /// What may be called.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.inner.policy
    }

    /// Checks a URL and posts to it.
    ///
    /// # Errors
    /// When it is refused, or no answer came back.
    pub async fn post_url(
        &self,
        url: &str,
        headers: HeaderMap,
        body: Bytes,
        options: Options,
    ) -> Result<Answer, Failure> {
        self.post(&self.inner.policy.check_url(url)?, headers, body, options).await
    }

    /// Posts once. The host is resolved and all its addresses are judged each time. `Host` and what belongs to
    /// the connection is set here, whatever `headers` say.
    ///
    /// # Errors
    /// When an address is refused, or no answer came back. Only [`Failure::Refused`] and [`Failure::Connect`] say
    /// for certain that nothing was received.
    pub async fn post(
        &self,
        target: &Target,
        headers: HeaderMap,
        body: Bytes,
        options: Options,
    ) -> Result<Answer, Failure> {
        let began = Instant::now();
        let within = options.timeout.unwrap_or(self.inner.limits.timeout);
        let answer = timeout(within, self.inner.attempt(target, headers, body)).await;
        let (response, body, is_truncated) = answer.unwrap_or(Err(Failure::Timeout))?;
        let status = response.status.as_u16();
        Ok(Answer { status, headers: response.headers, body, is_truncated, latency: began.elapsed() })
    }
}

impl<R: Resolve, C: Connect> Inner<R, C> {
    async fn attempt(
        &self,
        target: &Target,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<(http::response::Parts, Bytes, bool), Failure> {
        let addresses = self.judged_addresses(target).await?;
        let mut request = request(target, headers, body);
        for address in &addresses {
            let place = Place { is_https: target.is_https, host: target.host.clone(), address: *address };
            while let Some(mut connection) = self.pool.take(&place) {
                if connection.ready().await.is_err() {
                    continue;
                }
                match connection.try_send_request(request).await {
                    Ok(response) => return self.read(response, place, connection).await,
                    // It closed before a byte was sent.
                    Err(mut error) => match error.take_message() {
                        Some(unsent) => request = unsent,
                        None => return Err(failed(error.into_error())),
                    },
                }
            }
        }
        let (place, mut connection) = self.connect(target, &addresses).await?;
        let response = connection.send_request(request).await.map_err(failed)?;
        self.read(response, place, connection).await
    }

    /// All addresses of the target, each of them judged.
    async fn judged_addresses(&self, target: &Target) -> Result<Vec<SocketAddr>, Failure> {
        let mut addresses: Vec<IpAddr> = match target.literal {
            Some(address) => vec![address],
            None => self.resolver.resolve(&target.host).await.map_err(Failure::Connect)?,
        };
        self.policy.check_addresses(target, &addresses)?;
        if addresses.is_empty() {
            return Err(Failure::Connect(io::Error::new(io::ErrorKind::NotFound, "the host has no address")));
        }
        addresses.truncate(self.limits.addresses);
        Ok(addresses.into_iter().map(|address| SocketAddr::new(address, target.port)).collect())
    }

    async fn connect(&self, target: &Target, addresses: &[SocketAddr]) -> Result<(Place, Connection), Failure> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            match timeout(self.limits.connect_timeout, self.connector.connect(*address)).await {
                Ok(Ok(stream)) => {
                    let place = Place { is_https: target.is_https, host: target.host.clone(), address: *address };
                    return Ok((place, self.handshake(target, stream).await?));
                }
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(Failure::Connect(last))
    }

    async fn handshake(&self, target: &Target, stream: C::Stream) -> Result<Connection, Failure> {
        if !target.is_https {
            return self.speak(stream).await;
        }
        let name = match target.literal {
            Some(address) => ServerName::from(address),
            None => ServerName::try_from(target.host.clone())
                .map_err(|error| Failure::Connect(io::Error::new(io::ErrorKind::InvalidInput, error)))?,
        };
        let stream = self.tls.connect(name, stream).await.map_err(Failure::Connect)?;
        self.speak(stream).await
    }

    async fn speak<S>(&self, stream: S) -> Result<Connection, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(self.limits.head_bytes);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
        // It ends when the sender is dropped, or the other side hangs up; errors come back with the answer.
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Reads an answer up to the bound. A connection of which all was read is kept.
    async fn read(
        &self,
        response: Response<Incoming>,
        place: Place,
        connection: Connection,
    ) -> Result<(http::response::Parts, Bytes, bool), Failure> {
        let (head, mut body) = response.into_parts();
        let mut read = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(failed)?.into_data() else { continue };
            let room = self.limits.body_bytes - read.len();
            read.extend_from_slice(&data[..data.len().min(room)]);
            if data.len() > room {
                return Ok((head, read.freeze(), true));
            }
        }
        if head.status != StatusCode::SWITCHING_PROTOCOLS {
            self.pool.keep(place, connection);
        }
        Ok((head, read.freeze(), false))
    }
}

fn request(target: &Target, mut headers: HeaderMap, body: Bytes) -> Request<Full<Bytes>> {
    for of_the_connection in [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::EXPECT,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(of_the_connection);
    }
    headers.insert(header::HOST, target.authority.clone());
    headers.entry(header::USER_AGENT).or_insert(HeaderValue::from_static("relay"));
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = target.path.clone().into();
    *request.headers_mut() = headers;
    request
}

fn failed(error: hyper::Error) -> Failure {
    if error.is_parse_too_large() { Failure::TooLarge } else { Failure::Protocol(error) }
}
