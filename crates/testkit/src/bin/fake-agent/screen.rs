//! A full-screen program: old messages above a boxed input line, all drawn again with every change.

const WIDTH: usize = 76;
const ROWS: usize = 22;

/// The screen's contents.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    messages: Vec<String>,
}

impl Screen {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Switches to the alternate screen and bracketed paste, and draws.
    pub(crate) fn open(&self) -> String {
        format!("\x1b[?1049h\x1b[?2004h{}", self.draw(String::new()))
    }

    /// Adds a submitted message and draws.
    pub(crate) fn submit(&mut self, text: &str) -> String {
        self.messages.push(text.to_owned());
        self.draw(String::new())
    }

    /// Draws everything with this text in the box.
    pub(crate) fn draw(&self, input: String) -> String {
        let mut rows: Vec<String> = self.messages.iter().flat_map(|message| wrap(message)).collect();
        let boxed: Vec<String> = wrap(&input).into_iter().map(|row| format!("│ {row:WIDTH$} │")).collect();
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
