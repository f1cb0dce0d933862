//! Client that sends bytes as it likes: half of a request, one byte at a time, or nothing.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Longest wait for a status line.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Open connection to a gateway.
pub struct TcpClient(TcpStream);

/// Head of an answer.
#[derive(Debug)]
pub struct Head {
    pub status: u16,
    text: String,
}

impl Head {
    /// Returns whether the head has this line, in any case.
    #[must_use]
    pub fn has(&self, line: &str) -> bool {
        self.text.lines().any(|present| present.eq_ignore_ascii_case(line))
    }
}

impl TcpClient {
    /// Connects to the host and port of an `http://` URL.
    pub async fn connect(url: &str) -> Result<Self> {
        let address = url.trim_start_matches("http://").split('/').next().unwrap_or_default();
        Ok(Self(TcpStream::connect(address).await?))
    }

    /// Connects and asks for a WebSocket with these further header lines.
    pub async fn upgrade(url: &str, path: &str, headers: &[String]) -> Result<(Self, Head)> {
        let mut client = Self::connect(url).await?;
        let further: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: relay\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{further}\r\n"
        );
        client.send(request.as_bytes()).await?;
        let head = client.head().await?;
        Ok((client, head))
    }

    pub async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.write_all(bytes).await?)
    }

    /// Reads the head of an answer.
    pub async fn head(&mut self) -> Result<Head> {
        let mut text = Vec::new();
        let read = async {
            while !text.ends_with(b"\r\n\r\n") {
                text.push(self.0.read_u8().await?);
                ensure!(text.len() < 16 * 1024, "no head");
            }
            Ok(())
        };
        timeout(ANSWER_WITHIN, read).await.context("no answer")??;
        let text = String::from_utf8(text)?;
        let status = text.split(' ').nth(1).context("no status")?.parse()?;
        Ok(Head { status, text })
    }

    /// Reads the body of an answer and returns the code of its error.
    pub async fn error_code(&mut self, head: &Head) -> Result<String> {
        let length =
            head.text.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.context("no length")?];
        timeout(ANSWER_WITHIN, self.0.read_exact(&mut body)).await.context("no body")??;
        let body: serde_json::Value = serde_json::from_slice(&body)?;
        Ok(body["error"]["code"].as_str().context("no code")?.to_owned())
    }

    /// Reads until the server closes the connection, and returns the bytes; fails after `within`.
    pub async fn closed(mut self, within: Duration) -> Result<Vec<u8>> {
        let mut rest = Vec::new();
        match timeout(within, self.0.read_to_end(&mut rest)).await {
            Ok(Ok(_)) => Ok(rest),
            // A server that closes with unread bytes resets the connection.
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(rest),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => bail!("still open after {within:?}"),
        }
    }

    /// Sends a byte each `interval` until the server closes the connection; fails after `within`.
    pub async fn dribble(mut self, interval: Duration, within: Duration) -> Result<Vec<u8>> {
        let mut read = Vec::new();
        let (mut reader, mut writer) = self.0.split();
        let write = async {
            while writer.write_all(b"x").await.is_ok() {
                tokio::time::sleep(interval).await;
            }
            // The read sees the end.
            std::future::pending().await
        };
        let ended = async {
            tokio::select! {
                ended = reader.read_to_end(&mut read) => ended.map(drop),
                () = write => Ok(()),
            }
        };
        let _ = timeout(within, ended).await.with_context(|| format!("still open after {within:?}"))?;
        Ok(read)
    }
}
