//! Removal of single messages from the byte stream of a nats-server to a client.

/// Parser of one connection's stream that drops `MSG`/`HMSG` operations by subject.
///
/// Bytes of an incomplete operation are forwarded or dropped as they arrive: the decision is made when its control line
/// is complete, which is held back until then (a control line has at most 4 KiB).
#[derive(Debug, Default)]
pub(super) struct NatsMessages {
    line: Vec<u8>,
    /// Remaining payload bytes (with the final CRLF), and whether they are dropped.
    payload: Option<(usize, bool)>,
    /// `true` after a line that is not NATS: everything is forwarded.
    foreign: bool,
}

const LONGEST_LINE: usize = 64 * 1024;

impl NatsMessages {
    /// Reduces `chunk` to the bytes to forward now.
    pub(super) fn filter(&mut self, chunk: &mut Vec<u8>, mut drops: impl FnMut(&str) -> bool) {
        if self.foreign {
            return;
        }
        let input = std::mem::take(chunk);
        let mut rest = input.as_slice();
        while !rest.is_empty() {
            if let Some((left, dropped)) = self.payload {
                let taken = left.min(rest.len());
                if !dropped {
                    chunk.extend_from_slice(&rest[..taken]);
                }
                rest = &rest[taken..];
                self.payload = (left > taken).then_some((left - taken, dropped));
                continue;
            }
            let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
                self.line.extend_from_slice(rest);
                if self.line.len() > LONGEST_LINE || !could_be_nats(&self.line) {
                    self.foreign = true;
                    chunk.append(&mut self.line);
                }
                return;
            };
            self.line.extend_from_slice(&rest[..=end]);
            rest = &rest[end + 1..];
            if !could_be_nats(&self.line) {
                self.foreign = true;
                chunk.append(&mut self.line);
                chunk.extend_from_slice(rest);
                return;
            }
            let line = std::mem::take(&mut self.line);
            match parse_message_line(&line) {
                Some((subject, length)) => {
                    let dropped = drops(subject);
                    self.payload = Some((length + 2, dropped));
                    if !dropped {
                        chunk.extend_from_slice(&line);
                    }
                }
                None => chunk.extend_from_slice(&line),
            }
        }
    }
}

fn could_be_nats(line: &[u8]) -> bool {
    const OPERATIONS: [&[u8]; 7] = [b"INFO ", b"MSG ", b"HMSG ", b"PING", b"PONG", b"+OK", b"-ERR"];
    OPERATIONS.iter().any(|operation| {
        let compared = operation.len().min(line.len());
        line[..compared] == operation[..compared]
    })
}

/// Parses subject and payload length of a message's control line.
fn parse_message_line(line: &[u8]) -> Option<(&str, usize)> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    if !matches!(words.next()?, "MSG" | "HMSG") {
        return None;
    }
    let subject = words.next()?;
    Some((subject, words.next_back()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        "INFO {}\r\nMSG a.1 7 5\r\nhello\r\nPING\r\nHMSG b.2 8 r.1 4 6\r\nhhhhxx\r\nMSG c 9 2\r\n\n\n\r\n";

    fn filtered(pieces: usize) -> String {
        let mut nats = NatsMessages::default();
        let mut out = Vec::new();
        for piece in STREAM.as_bytes().chunks(pieces) {
            let mut chunk = piece.to_vec();
            nats.filter(&mut chunk, |subject| subject == "b.2");
            out.extend(chunk);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn one_message_is_removed_at_any_segmentation() {
        for pieces in 1..STREAM.len() {
            assert_eq!(
                filtered(pieces),
                "INFO {}\r\nMSG a.1 7 5\r\nhello\r\nPING\r\nMSG c 9 2\r\n\n\n\r\n",
                "in pieces of {pieces}"
            );
        }
    }

    #[test]
    fn another_protocol_is_forwarded_untouched() {
        let mut nats = NatsMessages::default();
        let mut chunk = b"R\0\0\0\x08\0\0\0\nMSG a 1 1\r\n".to_vec();
        let before = chunk.clone();
        nats.filter(&mut chunk, |_| true);
        assert_eq!(chunk, before);
    }
}
