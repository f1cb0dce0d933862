//! HTTP/1.1 messages and WebSocket frames, read from bytes that pass by.

use std::io::Cursor;

use tokio_tungstenite::tungstenite::protocol::frame::FrameHeader;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Control, Data, OpCode};

const MAX_HEADERS: usize = 64;

/// The first line of a message and its headers, whose names are in lower case.
#[derive(Clone, Debug, Default)]
pub(super) struct Head {
    pub(super) first_line: String,
    pub(super) headers: Vec<(String, String)>,
}

impl Head {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The word of the first line at this place.
    pub(super) fn word(&self, index: usize) -> &str {
        self.first_line.split(' ').nth(index).unwrap_or_default()
    }

    pub(super) fn is_event_stream(&self) -> bool {
        self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }
}

/// A complete message.
#[derive(Clone, Debug, Default)]
pub(super) struct Message {
    pub(super) head: Head,
    pub(super) body: Vec<u8>,
}

/// The messages of one direction of a connection.
#[derive(Debug, Default)]
pub(super) struct Messages {
    buffer: Vec<u8>,
    /// The message under way, with how its body ends.
    partial: Option<(Message, End)>,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Length(usize),
    Chunks,
    Connection,
}

impl Messages {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete message. `has_body` says whether a head without a length is followed by anything.
    pub(super) fn next(&mut self, has_body: impl Fn(&Head) -> bool) -> Option<Message> {
        if self.partial.is_none() {
            let head = self.take_head()?;
            let length = head.header("content-length").and_then(|text| text.parse().ok());
            let chunked = head.header("transfer-encoding").is_some_and(|coding| coding.contains("chunked"));
            let end = match length {
                _ if !has_body(&head) => End::Length(0),
                _ if chunked => End::Chunks,
                Some(length) => End::Length(length),
                None if head.first_line.starts_with("HTTP/") => End::Connection,
                None => End::Length(0),
            };
            self.partial = Some((Message { head, body: Vec::new() }, end));
        }
        let (message, end) = self.partial.as_mut()?;
        let complete = match end {
            End::Length(length) => {
                let taken = self.buffer.len().min(*length);
                message.body.extend(self.buffer.drain(..taken));
                *length -= taken;
                *length == 0
            }
            End::Chunks => take_chunks(&mut self.buffer, &mut message.body),
            End::Connection => {
                message.body.append(&mut self.buffer);
                false
            }
        };
        if complete { self.partial.take().map(|(message, _)| message) } else { None }
    }

    /// The message under way.
    pub(super) fn partial(&mut self) -> Option<&mut Message> {
        self.partial.as_mut().map(|(message, _)| message)
    }

    /// Bytes behind the last message: the first frames after an upgrade.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    fn take_head(&mut self) -> Option<Head> {
        let end = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
        let bytes: Vec<u8> = self.buffer.drain(..end).collect();
        let line_end = bytes.iter().position(|byte| *byte == b'\r')?;
        let first_line = String::from_utf8_lossy(&bytes[..line_end]).into_owned();
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let (_, parsed) = httparse::parse_headers(&bytes[line_end + 2..], &mut headers).ok()?.into_option()?;
        let text = |header: &httparse::Header<'_>| {
            (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).into_owned())
        };
        Some(Head { first_line, headers: parsed.iter().map(text).collect() })
    }
}

trait IntoOption<T> {
    fn into_option(self) -> Option<T>;
}

impl<T> IntoOption<T> for httparse::Status<T> {
    fn into_option(self) -> Option<T> {
        match self {
            Self::Complete(value) => Some(value),
            Self::Partial => None,
        }
    }
}

/// Moves complete chunks to `body`; whether the last one was among them.
fn take_chunks(buffer: &mut Vec<u8>, body: &mut Vec<u8>) -> bool {
    loop {
        let Ok(httparse::Status::Complete((start, length))) = httparse::parse_chunk_size(buffer) else { return false };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let end = start.saturating_add(length).saturating_add(2);
        if buffer.len() < end {
            return false;
        }
        body.extend_from_slice(&buffer[start..start + length]);
        buffer.drain(..end);
        if length == 0 {
            return true;
        }
    }
}

/// WebSocket message as a recording has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Text(String),
    /// Code and reason, as far as there are any.
    Close(String),
}

/// The frames of one direction of a WebSocket.
#[derive(Debug, Default)]
pub(super) struct Frames {
    buffer: Vec<u8>,
    text: Vec<u8>,
}

impl Frames {
    /// The messages that these bytes complete. Pings and pongs are not among them.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Vec<Frame> {
        self.buffer.extend_from_slice(bytes);
        let mut complete = Vec::new();
        while let Some((header, payload)) = self.take_frame() {
            match header.opcode {
                OpCode::Data(Data::Text | Data::Binary | Data::Continue) => {
                    self.text.extend(payload);
                    if header.is_final {
                        let text = std::mem::take(&mut self.text);
                        complete.push(Frame::Text(String::from_utf8_lossy(&text).into_owned()));
                    }
                }
                OpCode::Control(Control::Close) => {
                    let code = payload.first_chunk().map(|code| u16::from_be_bytes(*code).to_string());
                    let reason = String::from_utf8_lossy(payload.get(2..).unwrap_or_default()).into_owned();
                    complete.push(Frame::Close(format!("{} {reason}", code.unwrap_or_default())));
                }
                OpCode::Control(_) | OpCode::Data(Data::Reserved(_)) => {}
            }
        }
        complete
    }

    fn take_frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        let mut cursor = Cursor::new(self.buffer.as_slice());
        let (header, length) = FrameHeader::parse(&mut cursor).ok()??;
        let start = usize::try_from(cursor.position()).ok()?;
        let end = start + usize::try_from(length).ok()?;
        let mut payload = self.buffer.get(start..end)?.to_vec();
        self.buffer.drain(..end);
        if let Some(mask) = header.mask {
            payload.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        }
        Some((header, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_end_where_their_heads_say() {
        let mut messages = Messages::default();
        messages
            .feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\n");
        let with_body = |head: &Head| head.word(1) != "204";
        assert_eq!(messages.next(with_body).map(|message| message.body), Some(b"ok".to_vec()));
        assert_eq!(messages.next(with_body).map(|message| message.head.word(1).to_owned()), Some("204".to_owned()));
        assert!(messages.next(with_body).is_none());
        messages.feed(b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\n");
        assert!(messages.next(with_body).is_none());
        assert_eq!(messages.partial().map(|message| message.body.clone()), Some(b"abc".to_vec()));
        messages.feed(b"d\r\n0\r\n\r\n");
        assert_eq!(messages.next(with_body).map(|message| message.body), Some(b"abcd".to_vec()));
    }

    #[test]
    fn frames_are_unmasked_and_joined() {
        let mut frames = Frames::default();
        assert!(frames.feed(&[0x01, 0x81, 1, 0, 0, 0, b'a' ^ 1]).is_empty());
        assert_eq!(frames.feed(&[0x80, 0x01, b'b']), [Frame::Text("ab".to_owned())]);
        assert_eq!(frames.feed(&[0x88, 0x03, 0x03, 0xe8, b'x']), [Frame::Close("1000 x".to_owned())]);
    }
}
