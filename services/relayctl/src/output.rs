//! Tables for people, JSON for programs.

use std::io::{IsTerminal as _, Write as _};

use anyhow::Result;
use chrono::{DateTime, SecondsFormat, Utc};
use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;
use serde_json::Value;

/// How a command answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether programs read along.
    pub(crate) const fn is_json(self) -> bool {
        self.json
    }

    /// Prints rows: as a JSON array, or as a table with a line of headings. `empty` is what people read when there is none.
    pub(crate) fn rows<T: Serialize>(
        self,
        rows: &[T],
        headings: &[&str],
        cells: impl Fn(&T) -> Vec<String>,
        empty: &str,
    ) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(&exact(serde_json::to_value(rows)?))?);
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

    /// Prints one thing: as a JSON object, or as `lines`.
    pub(crate) fn one<T: Serialize>(self, value: &T, lines: impl FnOnce(&T) -> String) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(&exact(serde_json::to_value(value)?))?);
        } else {
            println!("{}", lines(value));
        }
        Ok(())
    }
}

/// A time as people read it: UTC, to the second.
pub(crate) fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// An empty cell for what is not there.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// The same with ids as text, as the API gives them: programs that read numbers as doubles lose what is above 2^53.
pub(crate) fn exact(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let exact_field = |(key, value): (String, Value)| {
                let is_id = key == "id" || key.ends_with("_id");
                let value = match value {
                    Value::Number(number) if is_id => Value::String(number.to_string()),
                    other => exact(other),
                };
                (key, value)
            };
            Value::Object(fields.into_iter().map(exact_field).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(exact).collect()),
        other => other,
    }
}

/// How far long work is, on a terminal's standard error; silent elsewhere, and for programs.
#[derive(Debug)]
pub(crate) struct Bar {
    what: &'static str,
    shown: bool,
    drawn: bool,
}

impl Bar {
    const WIDTH: u64 = 30;

    pub(crate) fn new(what: &'static str, out: Output) -> Self {
        Self { what, shown: !out.is_json() && std::io::stderr().is_terminal(), drawn: false }
    }

    pub(crate) fn show(&mut self, done: u64, of: u64) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r{}", line(self.what, done, of));
            self.drawn = true;
        }
    }

    /// Leaves the line.
    pub(crate) fn end(&self) {
        if self.drawn {
            eprintln!();
        }
    }
}

fn line(what: &str, done: u64, of: u64) -> String {
    let full = done.min(of) * Bar::WIDTH / of.max(1);
    let bar: String = (0..Bar::WIDTH).map(|cell| if cell < full { '#' } else { '.' }).collect();
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
        assert_eq!(exact(given), expected);
    }

    #[test]
    fn a_bar_is_full_at_the_end_and_empty_without_work() {
        assert_eq!(line("letters", 3, 3), format!("[{}] 3 of 3 letters", "#".repeat(30)));
        assert_eq!(line("letters", 0, 0), format!("[{}] 0 of 0 letters", ".".repeat(30)));
    }
}
