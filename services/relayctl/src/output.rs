//! Output of commands: tables for people, JSON for programs, and a progress bar.

use std::io::{IsTerminal as _, Write as _};

use anyhow::Result;
use chrono::{DateTime, SecondsFormat, Utc};
use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;
use serde_json::Value;

/// Output format of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) const fn is_json(self) -> bool {
        self.json
    }

    /// Prints rows as a JSON array, or as a table with headings. `empty` is printed instead of an empty table.
    pub(crate) fn print_rows<T: Serialize>(
        self,
        rows: &[T],
        headings: &[&str],
        cells: impl Fn(&T) -> Vec<String>,
        empty: &str,
    ) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(&ids_as_text(serde_json::to_value(rows)?))?);
        } else if rows.is_empty() {
            println!("{empty}");
        } else {
            let mut table = Table::new();
            table.load_preset(NOTHING).set_header(headings);
            table.add_rows(rows.iter().map(cells));
            println!("{table}");
        }
        Ok(())
    }

    /// Prints a value as a JSON object, or as `lines`.
    pub(crate) fn print_value<T: Serialize>(self, value: &T, lines: impl FnOnce(&T) -> String) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(&ids_as_text(serde_json::to_value(value)?))?);
        } else {
            println!("{}", lines(value));
        }
        Ok(())
    }
}

/// Formats a time: UTC, to the second.
pub(crate) fn format_time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Formats an optional value as a table cell.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Converts ids to text, as in the API: programs that read numbers as doubles lose digits above 2^53.
pub(crate) fn ids_as_text(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let convert_field = |(key, value): (String, Value)| {
                let is_id = key == "id" || key.ends_with("_id");
                let value = if is_id && value.is_number() { value.to_string().into() } else { ids_as_text(value) };
                (key, value)
            };
            Value::Object(fields.into_iter().map(convert_field).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(ids_as_text).collect()),
        scalar @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => scalar,
    }
}

/// Progress bar on a terminal's standard error; disabled elsewhere and with JSON output.
#[derive(Debug)]
pub(crate) struct ProgressBar {
    what: &'static str,
    shown: bool,
    drawn: bool,
}

impl ProgressBar {
    const WIDTH: u64 = 30;

    pub(crate) fn new(what: &'static str, out: Output) -> Self {
        Self { what, shown: !out.is_json() && std::io::stderr().is_terminal(), drawn: false }
    }

    pub(crate) fn update(&mut self, done: u64, of: u64) {
        if self.shown {
            // A bar that cannot be drawn must not end the command.
            let _ = write!(std::io::stderr(), "\r{}", draw_line(self.what, done, of));
            self.drawn = true;
        }
    }

    /// Ends the line of the bar.
    pub(crate) fn finish(&self) {
        if self.drawn {
            eprintln!();
        }
    }
}

fn draw_line(what: &str, done: u64, of: u64) -> String {
    // The total may have been read before the work grew: the bar stays full.
    let full = done.min(of) * ProgressBar::WIDTH / of.max(1);
    let bar: String = (0..ProgressBar::WIDTH).map(|cell| if cell < full { '#' } else { '.' }).collect();
    format!("[{bar}] {done} of {of} {what}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ids_are_text_and_counts_are_numbers() {
        let given =
            json!([{ "workspace_id": 9_007_199_254_740_993_i64, "agents": 2, "inside": { "id": 5, "node_id": "n" } }]);
        let expected =
            json!([{ "workspace_id": "9007199254740993", "agents": 2, "inside": { "id": "5", "node_id": "n" } }]);
        assert_eq!(ids_as_text(given), expected);
    }

    #[test]
    fn a_bar_is_full_at_the_end_and_empty_without_work() {
        assert_eq!(draw_line("letters", 3, 3), format!("[{}] 3 of 3 letters", "#".repeat(30)));
        assert_eq!(draw_line("letters", 0, 0), format!("[{}] 0 of 0 letters", ".".repeat(30)));
    }
}
