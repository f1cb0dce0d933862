//! HTTP endpoints for deliveries: one listener, many paths, 204 to every request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

const ANSWER: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";

/// Requests received so far.
#[derive(Debug, Default)]
struct Seen {
    calls: AtomicU64,
    /// Highest seq of each endpoint.
    highest: Mutex<Vec<u64>>,
    repeated: AtomicU64,
    skipped: AtomicU64,
    changed: Notify,
}

/// Handle on all endpoints.
#[derive(Clone, Debug)]
pub(crate) struct Endpoints {
    address: String,
    seen: Arc<Seen>,
}

impl Endpoints {
    /// Starts `count` endpoints.
    pub(crate) async fn start(count: usize) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let seen = Arc::new(Seen { highest: Mutex::new(vec![0; count]), ..Seen::default() });
        let endpoints = Self { address: listener.local_addr()?.to_string(), seen };
        let seen = Arc::clone(&endpoints.seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&seen)));
            }
        });
        Ok(endpoints)
    }

    pub(crate) fn base(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.seen.calls.load(Ordering::Relaxed)
    }

    /// Waits for this many calls.
    pub(crate) async fn wait_for(&self, calls: u64) {
        loop {
            let changed = self.seen.changed.notified();
            if self.calls() >= calls {
                return;
            }
            changed.await;
        }
    }

    /// Returns the violations of the delivery order.
    pub(crate) fn problems(&self) -> Vec<String> {
        let (repeated, skipped) =
            (self.seen.repeated.load(Ordering::Relaxed), self.seen.skipped.load(Ordering::Relaxed));
        [(repeated, "came again or late"), (skipped, "were skipped")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} deliveries {what}"))
            .collect()
    }
}

async fn serve(mut stream: TcpStream, seen: Arc<Seen>) {
    let mut buffer = Vec::with_capacity(4096);
    loop {
        while let Some((head_ends, length)) = head(&buffer) {
            let ends = head_ends + length;
            while buffer.len() < ends {
                if !matches!(stream.read_buf(&mut buffer).await, Ok(1..)) {
                    return;
                }
            }
            note(&seen, &buffer[..head_ends], &buffer[head_ends..ends]);
            buffer.drain(..ends);
            if stream.write_all(ANSWER).await.is_err() {
                return;
            }
        }
        if !matches!(stream.read_buf(&mut buffer).await, Ok(1..)) {
            return;
        }
    }
}

/// Returns the length of the head and of the body, once the head is complete.
fn head(buffer: &[u8]) -> Option<(usize, usize)> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(ends) = request.parse(buffer).ok()? else { return None };
    let length = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok());
    Some((ends, length.unwrap_or(0)))
}

/// Counts a call. The path ends with the endpoint's number; a body with a seq is a delivery.
fn note(seen: &Seen, head: &[u8], body: &[u8]) {
    if let (Some(endpoint), Some(seq)) = (number_after(head, b"/e/"), number_after(body, b"\"seq\":")) {
        let mut highest = seen.highest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(highest) = usize::try_from(endpoint).ok().and_then(|endpoint| highest.get_mut(endpoint)) {
            if seq <= *highest {
                seen.repeated.fetch_add(1, Ordering::Relaxed);
            } else {
                seen.skipped.fetch_add(seq - *highest - 1, Ordering::Relaxed);
                *highest = seq;
            }
        }
    }
    seen.calls.fetch_add(1, Ordering::Relaxed);
    seen.changed.notify_waiters();
}

fn number_after(bytes: &[u8], mark: &[u8]) -> Option<u64> {
    let at = bytes.windows(mark.len()).position(|window| window == mark)? + mark.len();
    let digits = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&bytes[at..at + digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_checked_per_endpoint() {
        let seen = Seen { highest: Mutex::new(vec![0; 2]), ..Seen::default() };
        for (path, seq) in [("/e/0", 1), ("/e/1", 1), ("/e/0", 2), ("/e/0", 2), ("/e/1", 4)] {
            note(&seen, format!("POST {path} HTTP/1.1").as_bytes(), format!(r#"{{"seq":{seq},"x":1}}"#).as_bytes());
        }
        assert_eq!(seen.calls.into_inner(), 5);
        assert_eq!((seen.repeated.into_inner(), seen.skipped.into_inner()), (1, 2));
    }
}
