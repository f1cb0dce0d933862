//! Minimal HTTP/1.1 over persistent connections: the generator shares its cores with the measured processes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timeout of one request.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Maximum size of an answer, in bytes.
const LARGEST_ANSWER: usize = 4 << 20;

/// Connections to one gateway, as many as there were concurrent requests; the most recently used one is reused first.
#[derive(Debug)]
pub(crate) struct Pool {
    address: String,
    idle: Mutex<Vec<TcpStream>>,
}

/// Answer of any status.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Body; empty without one.
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// Returns the answer if it is a 2xx.
    pub(crate) fn success(self) -> Result<Self> {
        let ok = (200..300).contains(&self.status);
        ensure!(ok, "answered {}: {}", self.status, String::from_utf8_lossy(&self.body));
        Ok(self)
    }
}

impl Pool {
    /// Creates a pool for `http://host:port`.
    pub(crate) fn new(url: &str) -> Self {
        let address = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
        Self { address, idle: Mutex::default() }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sends one request. It is never repeated: after an error its effect is unknown.
    pub(crate) async fn post(&self, path: &str, token: Option<&str>, body: &str) -> Result<Answer> {
        self.ask("POST", path, token, None, body).await
    }

    /// Posts with an idempotency key, so that the caller may repeat the request.
    pub(crate) async fn post_keyed(&self, path: &str, token: &str, key: &str, body: &str) -> Result<Answer> {
        self.ask("POST", path, Some(token), Some(("idempotency-key", key)), body).await
    }

    /// Posts without a token as a trusted proxy does for a client at `address`.
    pub(crate) async fn post_forwarded(&self, path: &str, address: &str, body: &str) -> Result<Answer> {
        self.ask("POST", path, None, Some(("x-forwarded-for", address)), body).await
    }

    /// Sends a GET request.
    pub(crate) async fn get(&self, path: &str, token: Option<&str>) -> Result<Answer> {
        self.ask("GET", path, token, None, "").await
    }

    /// Sends a DELETE request.
    pub(crate) async fn delete(&self, path: &str, token: &str) -> Result<Answer> {
        self.ask("DELETE", path, Some(token), None, "").await
    }

    async fn ask(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        header: Option<(&str, &str)>,
        body: &str,
    ) -> Result<Answer> {
        let request = encode(&self.address, method, path, token, header, body);
        tokio::time::timeout(ANSWER_WITHIN, self.exchange(&request))
            .await
            .with_context(|| format!("no answer to {method} {path}"))?
            .with_context(|| format!("{method} {path} to {}", self.address))
    }

    async fn exchange(&self, request: &[u8]) -> Result<Answer> {
        let mut stream = self.connection().await?;
        stream.write_all(request).await?;
        let (answer, keep) = read_answer(&mut stream).await?;
        if keep {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
        Ok(answer)
    }

    async fn connection(&self) -> Result<TcpStream> {
        loop {
            let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(stream) = kept else { break };
            // Anything readable before a request means that the server has closed the connection.
            let mut byte = [0];
            let quiet = matches!(stream.try_read(&mut byte), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
            if quiet {
                return Ok(stream);
            }
        }
        let stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

fn encode(
    host: &str,
    method: &str,
    path: &str,
    token: Option<&str>,
    header: Option<(&str, &str)>,
    body: &str,
) -> Vec<u8> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\n");
    if let Some(token) = token {
        request.push_str("authorization: Bearer ");
        request.push_str(token);
        request.push_str("\r\n");
    }
    if let Some((name, value)) = header {
        request.push_str(name);
        request.push_str(": ");
        request.push_str(value);
        request.push_str("\r\n");
    }
    if body.is_empty() {
        request.push_str("\r\n");
        return request.into_bytes();
    }
    let length = body.len();
    request.push_str(&format!("content-type: application/json\r\ncontent-length: {length}\r\n\r\n"));
    request.push_str(body);
    request.into_bytes()
}

async fn read_answer(stream: &mut TcpStream) -> Result<(Answer, bool)> {
    let mut buffer = Vec::with_capacity(2048);
    let head = loop {
        ensure!(stream.read_buf(&mut buffer).await? > 0, "the connection was closed before the answer");
        if let Some(head) = parse_head(&buffer)? {
            break head;
        }
        ensure!(buffer.len() < 64 * 1024, "the answer's head is too large");
    };
    let end = head.length + head.body_length;
    ensure!(end <= LARGEST_ANSWER, "the answer is too large");
    while buffer.len() < end {
        ensure!(stream.read_buf(&mut buffer).await? > 0, "the connection was closed within the answer");
    }
    buffer.truncate(end);
    buffer.drain(..head.length);
    Ok((Answer { status: head.status, body: buffer }, head.keep))
}

#[derive(Debug, PartialEq)]
struct Head {
    status: u16,
    length: usize,
    body_length: usize,
    keep: bool,
}

fn parse_head(bytes: &[u8]) -> Result<Option<Head>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(length) = response.parse(bytes)? else {
        return Ok(None);
    };
    let status = response.code.context("an answer without a status")?;
    let value = |name: &str| {
        response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
    };
    let body_length = match value("content-length") {
        Some(digits) => std::str::from_utf8(digits)?.trim().parse()?,
        None if status == 204 || status == 304 => 0,
        None => bail!("an answer of status {status} without a content-length"),
    };
    let keep = !value("connection").is_some_and(|value| value.eq_ignore_ascii_case(b"close"));
    Ok(Some(Head { status, length, body_length, keep }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<Head>> {
        parse_head(text.as_bytes())
    }

    #[test]
    fn a_head_is_read_once_it_is_complete() {
        let text = "HTTP/1.1 201 Created\r\nContent-Length: 7\r\n\r\n";
        let expected = Head { status: 201, length: text.len(), body_length: 7, keep: true };
        assert_eq!(head(text).unwrap(), Some(expected));
        assert_eq!(head(&text[..30]).unwrap(), None);
        assert_eq!(head("HTTP/1.1 204 No Content\r\n\r\n").unwrap().unwrap().body_length, 0);
        assert!(!head("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").unwrap().unwrap().keep);
        assert!(head("HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(head("nonsense\r\n\r\n").is_err());
    }

    #[tokio::test]
    async fn a_connection_is_kept_and_a_closed_one_is_replaced() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let mut accepted = 0;
            for answers in [2, 1] {
                let (mut stream, _) = listener.accept().await.unwrap();
                accepted += 1;
                for _ in 0..answers {
                    let mut bytes = vec![0; 4096];
                    let length = stream.read(&mut bytes).await.unwrap();
                    assert!(String::from_utf8_lossy(&bytes[..length]).ends_with("\r\n\r\n{}"));
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                }
            }
            accepted
        });
        let pool = Pool::new(&format!("http://{address}/"));
        for _ in 0..3 {
            let answer = pool.post("/x", Some("t"), "{}").await.unwrap().success().unwrap();
            assert_eq!(answer.body, b"ok");
            // Lets the server's close arrive before the next request checks for it.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(server.await.unwrap(), 2);
    }
}
