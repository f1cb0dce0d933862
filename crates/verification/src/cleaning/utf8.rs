//! [`Utf8Decoder`]: bytes to text, with the same result for any split of the bytes.

/// Decodes UTF-8 that arrives in pieces. Invalid bytes become U+FFFD, one for each maximal prefix of a character, as
/// in `String::from_utf8_lossy`.
#[derive(Debug, Default)]
pub(super) struct Utf8Decoder {
    /// The beginning of a character at the end of the bytes so far.
    partial: [u8; 4],
    partial_length: usize,
}

impl Utf8Decoder {
    /// Hands the text of `bytes` to `sink`, in order.
    pub(super) fn decode(&mut self, bytes: &[u8], mut sink: impl FnMut(&str)) {
        let rest = self.complete_partial(bytes, &mut sink);
        let mut consumed = 0;
        for chunk in rest.utf8_chunks() {
            let invalid = chunk.invalid();
            consumed += chunk.valid().len() + invalid.len();
            sink(chunk.valid());
            // Only the last bytes may be completed by the next ones; anywhere else they are invalid.
            if consumed == rest.len() && is_incomplete(invalid) {
                self.partial[..invalid.len()].copy_from_slice(invalid);
                self.partial_length = invalid.len();
            } else if !invalid.is_empty() {
                sink("\u{FFFD}");
            }
        }
    }

    /// Completes the character left over from the bytes before, and returns the bytes after it.
    fn complete_partial<'a>(&mut self, bytes: &'a [u8], sink: &mut impl FnMut(&str)) -> &'a [u8] {
        for (position, byte) in bytes.iter().enumerate() {
            if self.partial_length == 0 {
                return &bytes[position..];
            }
            self.partial[self.partial_length] = *byte;
            let candidate = &self.partial[..=self.partial_length];
            match std::str::from_utf8(candidate) {
                Ok(character) => {
                    sink(character);
                    self.partial_length = 0;
                }
                Err(_) if is_incomplete(candidate) => self.partial_length += 1,
                Err(_) => {
                    // The byte does not continue the character; it is decoded again by itself.
                    sink("\u{FFFD}");
                    self.partial_length = 0;
                    return &bytes[position..];
                }
            }
        }
        &[]
    }
}

/// Returns `true` if more bytes could make `bytes` a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_split_decodes_like_the_whole(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(0xE2), Just(0x9C), Just(0xF0), Just(0x80), Just(0x41)], 0..64),
            size in 1usize..5,
        ) {
            let mut decoder = Utf8Decoder::default();
            let mut text = String::new();
            for read in bytes.chunks(size) {
                decoder.decode(read, |part| text.push_str(part));
            }
            // A final ESC shows the replacement for a character that never got complete.
            decoder.decode(b"\x1b", |part| text.push_str(part));
            let mut whole = bytes.clone();
            whole.push(0x1B);
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }
    }
}
