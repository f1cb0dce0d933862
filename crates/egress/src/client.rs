//! HTTP client for a single POST to a tenant's URL. Main type: [`Client`].

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

use crate::{
    Connect, Policy, Refusal, Resolve, SystemResolver, Target, TcpConnector, Tenant,
    pool::{Connection, Pool, PoolKey},
    tls,
};

/// Limits of one call.
#[derive(Debug, Clone, Copy)]
pub struct CallLimits {
    /// Timeout from resolving the host to the last byte of the answer.
    pub timeout: Duration,
    /// Timeout of one TCP connection, after which the next address is tried.
    pub connect_timeout: Duration,
    /// Maximum number of addresses of a host to try, after all were checked.
    pub addresses: usize,
    /// Maximum size of status line and headers of an answer, in bytes; at least 8192.
    pub head_bytes: usize,
    /// Maximum number of bytes read of an answer's body.
    pub body_bytes: usize,
}

impl Default for CallLimits {
    /// 10 s for one attempt (docs/protocol/node.md, "Push request"), and small answers.
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

/// Options of a single call.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallOptions {
    /// Overrides [`CallLimits::timeout`].
    pub timeout: Option<Duration>,
    /// Tenant whose share of the lookups is used.
    pub tenant: Tenant,
}

/// Answer of an endpoint.
#[derive(Debug, Clone)]
pub struct Answer {
    /// HTTP status. Redirects are returned as they are.
    pub status: u16,
    /// HTTP headers of the answer.
    pub headers: HeaderMap,
    /// Body, truncated to [`CallLimits::body_bytes`].
    pub body: Bytes,
    /// `true` if the body was longer.
    pub is_truncated: bool,
    /// Duration of the whole call.
    pub latency: Duration,
}

/// Reason for the lack of an answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The policy blocks the URL or an address of its host. Nothing was sent.
    #[error("not called: {0}")]
    Refused(#[from] Refusal),
    /// The call timed out. The endpoint may have received the request.
    #[error("no complete answer in time")]
    Timeout,
    /// No address, no listener, or a failed TLS handshake. Nothing was sent.
    #[error("no connection")]
    Connect(#[source] io::Error),
    /// The connection broke, or the answer was not HTTP. The endpoint may have received the request.
    #[error("no valid answer")]
    Protocol(#[source] hyper::Error),
    /// The head of the answer exceeded its limit. The endpoint received the request.
    #[error("the answer's headers are too large")]
    TooLarge,
}

/// HTTP client for tenants' URLs. Clones share their connections.
#[derive(Clone)]
pub struct Client<R = SystemResolver, C = TcpConnector> {
    inner: Arc<Inner<R, C>>,
}

struct Inner<R, C> {
    policy: Policy,
    limits: CallLimits,
    resolver: R,
    connector: C,
    tls: TlsConnector,
    pool: Arc<Pool>,
}

impl Client {
    /// Creates a client with the system resolver and TCP. Reads the root certificates of the machine.
    #[must_use]
    pub fn new(policy: Policy, limits: CallLimits, resolver: SystemResolver) -> Self {
        Self::with_transport(policy, limits, resolver, TcpConnector)
    }
}

impl<R: Resolve, C: Connect> Client<R, C> {
    /// Creates a client with a custom resolver and connector.
    #[must_use]
    pub fn with_transport(policy: Policy, limits: CallLimits, resolver: R, connector: C) -> Self {
        let inner = Inner { policy, limits, resolver, connector, tls: tls::connector(), pool: Arc::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the policy of this client.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.inner.policy
    }

    /// Posts once. Every call resolves the host and checks all its addresses. `Host` and the headers of the connection
    /// are always set by the client.
    ///
    /// # Errors
    /// If an address is refused, or there is no answer. Only [`Failure::Refused`] and [`Failure::Connect`] guarantee
    /// that nothing was received.
    pub async fn post(
        &self,
        target: &Target,
        headers: HeaderMap,
        body: Bytes,
        options: CallOptions,
    ) -> Result<Answer, Failure> {
        let began = Instant::now();
        let within = options.timeout.unwrap_or(self.inner.limits.timeout);
        let answer = timeout(within, self.inner.attempt(options.tenant, target, headers, body)).await;
        let (response, body, is_truncated) = answer.unwrap_or(Err(Failure::Timeout))?;
        let status = response.status.as_u16();
        Ok(Answer { status, headers: response.headers, body, is_truncated, latency: began.elapsed() })
    }
}

impl<R: Resolve, C: Connect> Inner<R, C> {
    async fn attempt(
        &self,
        tenant: Tenant,
        target: &Target,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<(http::response::Parts, Bytes, bool), Failure> {
        let addresses = self.resolve_checked(tenant, target).await?;
        let mut request = build_request(target, headers, body);
        // An idle connection to any of the addresses saves the round trips of a new one.
        for address in &addresses {
            let place = PoolKey { is_https: target.is_https, host: target.host.clone(), address: *address };
            // Each turn takes a connection out of the pool, so the loop ends.
            while let Some(mut connection) = self.pool.take(&place) {
                // Closed by the endpoint while it was idle. Nothing was sent.
                if connection.ready().await.is_err() {
                    continue;
                }
                match connection.try_send_request(request).await {
                    Ok(response) => return self.read_answer(response, place, connection).await,
                    // The idle connection was closed before a byte was sent, so the request can be repeated.
                    Err(mut error) => match error.take_message() {
                        Some(unsent) => request = unsent,
                        None => return Err(classify_error(error.into_error())),
                    },
                }
            }
        }
        let (place, mut connection) = self.connect(target, &addresses).await?;
        // Not repeated after a failure: the endpoint may have received the request.
        let response = connection.send_request(request).await.map_err(classify_error)?;
        self.read_answer(response, place, connection).await
    }

    /// Resolves the target and checks all its addresses, so that no unchecked one can be connected to.
    async fn resolve_checked(&self, tenant: Tenant, target: &Target) -> Result<Vec<SocketAddr>, Failure> {
        let mut addresses: Vec<IpAddr> = match target.literal {
            Some(address) => vec![address],
            None => self.resolver.resolve(tenant, &target.host).await.map_err(Failure::Connect)?,
        };
        self.policy.check_addresses(target, &addresses)?;
        if addresses.is_empty() {
            return Err(Failure::Connect(io::Error::new(io::ErrorKind::NotFound, "the host has no address")));
        }
        // After the check: a blocked address beyond the limit refuses the host as well.
        addresses.truncate(self.limits.addresses);
        Ok(addresses.into_iter().map(|address| SocketAddr::new(address, target.port)).collect())
    }

    async fn connect(&self, target: &Target, addresses: &[SocketAddr]) -> Result<(PoolKey, Connection), Failure> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            // One deadline for each address: a dead one must not use up the time of the whole call.
            match timeout(self.limits.connect_timeout, self.connector.connect(*address)).await {
                Ok(Ok(stream)) => {
                    let place = PoolKey { is_https: target.is_https, host: target.host.clone(), address: *address };
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
            return self.start_http(stream).await;
        }
        let name = match target.literal {
            Some(address) => ServerName::from(address),
            None => ServerName::try_from(target.host.clone())
                .map_err(|error| Failure::Connect(io::Error::new(io::ErrorKind::InvalidInput, error)))?,
        };
        let stream = self.tls.connect(name, stream).await.map_err(Failure::Connect)?;
        self.start_http(stream).await
    }

    async fn start_http<S>(&self, stream: S) -> Result<Connection, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http1::Builder::new();
        // hyper has no limit for the head itself; a head must fit into the read buffer.
        builder.max_buf_size(self.limits.head_bytes);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(classify_error)?;
        // Ends when the sender is dropped or the peer closes; errors surface with the answer.
        self.pool.spawn(async {
            let _ = connection.await;
        });
        Ok(sender)
    }

    /// Reads an answer up to the limit. Only a completely read connection is reusable.
    async fn read_answer(
        &self,
        response: Response<Incoming>,
        place: PoolKey,
        connection: Connection,
    ) -> Result<(http::response::Parts, Bytes, bool), Failure> {
        let (head, mut body) = response.into_parts();
        let mut read = BytesMut::new();
        while let Some(frame) = body.frame().await {
            // Trailers have no meaning here.
            let Ok(data) = frame.map_err(classify_error)?.into_data() else { continue };
            let room = self.limits.body_bytes - read.len();
            read.extend_from_slice(&data[..data.len().min(room)]);
            // The connection is dropped, because the rest may have no end.
            if data.len() > room {
                return Ok((head, read.freeze(), true));
            }
        }
        // After a 101 the connection may speak another protocol than HTTP.
        if head.status != StatusCode::SWITCHING_PROTOCOLS {
            self.pool.keep(place, connection);
        }
        Ok((head, read.freeze(), false))
    }
}

fn build_request(target: &Target, mut headers: HeaderMap, body: Bytes) -> Request<Full<Bytes>> {
    // Headers of the connection and its framing. With a tenant's own ones, an endpoint or a proxy could see a second
    // request.
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

fn classify_error(error: hyper::Error) -> Failure {
    if error.is_parse_too_large() { Failure::TooLarge } else { Failure::Protocol(error) }
}
