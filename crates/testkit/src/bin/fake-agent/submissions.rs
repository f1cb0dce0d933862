//! Bytes from the terminal to submitted messages.

const PASTE_BEGIN: &[u8] = b"\x1b[200~";
const PASTE_END: &[u8] = b"\x1b[201~";

/// Collects what is typed. Enter submits; inside a bracketed paste everything is text.
#[derive(Debug, Default)]
pub(crate) struct Submissions {
    text: Vec<u8>,
    is_pasting: bool,
}

impl Submissions {
    /// Takes bytes and returns the messages that they complete.
    pub(crate) fn on_bytes(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut submitted = Vec::new();
        for &byte in bytes {
            match byte {
                // In canonical mode the kernel has made a line feed of Enter.
                b'\r' | b'\n' if !self.is_pasting => {
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

    /// What was typed and not submitted.
    pub(crate) fn unfinished(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }
}
