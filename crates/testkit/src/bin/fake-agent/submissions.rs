//! Bytes from the terminal to submitted messages.

const PASTE_BEGIN: &[u8] = b"\x1b[200~";
const PASTE_END: &[u8] = b"\x1b[201~";

/// Collects what is typed. Enter submits; inside a bracketed paste everything is text.
#[derive(Debug)]
pub(crate) struct Submissions {
    /// In canonical mode the kernel makes a line feed of Enter; otherwise a line feed is text.
    enter: u8,
    text: Vec<u8>,
    is_pasting: bool,
}

impl Submissions {
    pub(crate) fn new(is_canonical: bool) -> Self {
        Self { enter: if is_canonical { b'\n' } else { b'\r' }, text: Vec::new(), is_pasting: false }
    }

    /// Takes bytes and returns the messages that they complete.
    pub(crate) fn on_bytes(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut submitted = Vec::new();
        for &byte in bytes {
            match byte {
                byte if byte == self.enter && !self.is_pasting => {
                    if !self.text.is_empty() {
                        submitted.push(String::from_utf8_lossy(&std::mem::take(&mut self.text)).into_owned());
                    }
                }
                byte => self.text.push(byte),
            }
            for (mark, is_pasting) in [(PASTE_BEGIN, true), (PASTE_END, false)] {
                if self.text.ends_with(mark) {
                    self.text.truncate(self.text.len() - mark.len());
                    self.is_pasting = is_pasting;
                }
            }
        }
        submitted
    }

    /// Returns the text that was typed and not submitted.
    pub(crate) fn unfinished(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }
}
