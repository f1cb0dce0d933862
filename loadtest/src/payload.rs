//! Message texts: a timestamp of sending, padded to a size.

use std::sync::OnceLock;
use std::time::Instant;

/// Prefix of every text, followed by the timestamp and a space.
const MARK: &str = "lt1:";
/// Maximum length of prefix, timestamp and space.
pub(crate) const SMALLEST: u32 = 32;

/// Returns microseconds on the clock of this process. Sender and receiver share it, so differences are exact.
pub(crate) fn now_micros() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Appends a text of `size` bytes with the timestamp `sent_at`. It needs no escaping in JSON.
pub(crate) fn push_text(out: &mut String, sent_at: u64, size: usize) {
    let begin = out.len();
    out.push_str(MARK);
    out.push_str(&sent_at.to_string());
    out.push(' ');
    while out.len() - begin < size {
        let missing = size - (out.len() - begin);
        out.push_str(&FILL[..missing.min(FILL.len())]);
    }
}

/// Returns the timestamp of the first text in `frame`, which may be a text or JSON that contains it.
pub(crate) fn sent_at(frame: &str) -> Option<u64> {
    let (_, rest) = frame.split_once(MARK)?;
    let digits = rest.split(' ').next()?;
    digits.parse().ok()
}

const FILL: &str = "The quick brown fox jumps over the lazy dog, and nobody minds that it has done so before. ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_its_size_and_contains_its_timestamp() {
        for size in [SMALLEST as usize, 512, 4096] {
            let mut text = String::from("{\"text\":\"");
            let begin = text.len();
            push_text(&mut text, 1_234_567, size);
            assert_eq!(text.len() - begin, size);
            text.push_str("\"}");
            assert_eq!(sent_at(&text), Some(1_234_567));
            assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok());
        }
        assert_eq!(sent_at("no stamp here"), None);
        assert_eq!(sent_at("lt1:x "), None);
    }

    #[test]
    fn the_smallest_text_fits_any_timestamp() {
        let mut text = String::new();
        push_text(&mut text, u64::MAX, SMALLEST as usize);
        assert_eq!(text.len(), SMALLEST as usize);
    }
}
