//! A full-screen program: old messages above a boxed input line, all drawn again with every change.

const WIDTH: usize = 76;
const ROWS: usize = 22;

/// A longer text in the box is shown as a placeholder, if at all.
const FOLDED_FROM: usize = 20;

/// The screen's contents.
#[derive(Debug)]
pub(crate) struct Screen {
    messages: Vec<String>,
    folds: bool,
}

impl Screen {
    pub(crate) fn new(folds: bool) -> Self {
        Self { messages: Vec::new(), folds }
    }

    fn shown(&self, text: String) -> String {
        if self.folds && text.len() > FOLDED_FROM {
            format!("[Pasted text #{}]", self.messages.len() + 1)
        } else {
            text
        }
    }

    /// Switches to the alternate screen and bracketed paste, and draws.
    pub(crate) fn open(&self) -> String {
        format!("\x1b[?1049h\x1b[?2004h{}", self.draw(String::new()))
    }

    /// Adds a submitted message and draws.
    pub(crate) fn submit(&mut self, text: &str) -> String {
        self.messages.push(self.shown(text.to_owned()));
        self.draw(String::new())
    }

    /// Draws everything with this text in the box.
    pub(crate) fn draw(&self, input: String) -> String {
        let mut rows: Vec<String> = self.messages.iter().flat_map(|message| wrap(message)).collect();
        let boxed: Vec<String> = wrap(&self.shown(input)).into_iter().map(|row| format!("│ {row:WIDTH$} │")).collect();
        rows.push(format!("╭{}╮", "─".repeat(WIDTH + 2)));
        rows.extend(boxed);
        rows.push(format!("╰{}╯", "─".repeat(WIDTH + 2)));
        rows.push("❯ ".to_owned());
        let visible = rows.iter().skip(rows.len().saturating_sub(ROWS));
        visible.enumerate().fold("\x1b[2J".to_owned(), |drawn, (row, text)| format!("{drawn}\x1b[{};1H{text}", row + 1))
    }
}

fn wrap(text: &str) -> Vec<String> {
    let characters: Vec<char> = text.replace('\n', " ").chars().collect();
    if characters.is_empty() {
        return vec![String::new()];
    }
    characters.chunks(WIDTH).map(|row| row.iter().collect()).collect()
}
