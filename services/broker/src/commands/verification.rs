//! `verification`: prints a table of the deliveries to each agent program, or to one agent.

use std::{fmt::Write as _, io::Write as _};

use anyhow::{Context as _, Result};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value};

use super::broker_client;
use crate::cli;

const COLUMNS: [&str; 13] = [
    "PROGRAM",
    "VERSION",
    "DELIVERIES",
    "VERIFIED",
    "ECHO",
    "FILE",
    "MCP",
    "UNVERIFIED",
    "FAILED",
    "P50 MS",
    "P95 MS",
    "ATTEMPTS",
    "SUPPRESSED",
];

pub(crate) async fn verification(arguments: cli::Verification) -> Result<()> {
    let rows = match &arguments.agent {
        None => {
            let answer = broker_client::get(arguments.broker, "/api/verification").await?;
            answer["programs"].as_array().cloned().unwrap_or_default()
        }
        Some(agent) => {
            let path = format!("/api/verification?agent={}", utf8_percent_encode(agent, NON_ALPHANUMERIC));
            let mut answer = broker_client::get(arguments.broker, &path).await?;
            let mut figures = answer["figures"].take();
            figures["harness"] = answer["harness"].take();
            vec![figures]
        }
    };
    std::io::stdout().write_all(table(&rows).as_bytes()).context("print the table")
}

/// The table, with what was learned of a program and what is recommended below its row.
fn table(programs: &[Value]) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    rows.extend(programs.iter().map(cells));
    let widths: Vec<usize> = (0..COLUMNS.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default())
        .collect();
    let notes = std::iter::once(Vec::new()).chain(programs.iter().map(notes));
    let mut text = String::new();
    for (row, notes) in rows.iter().zip(notes) {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        // Writing into a string does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
        for note in notes {
            let _ = writeln!(text, "  {note}");
        }
    }
    text
}

fn cells(program: &Value) -> [String; COLUMNS.len()] {
    let percent = |value: &Value| value.as_f64().map_or_else(|| "-".to_owned(), |share| format!("{share} %"));
    let number = |value: &Value| if value.is_null() { "-".to_owned() } else { value.to_string() };
    let word = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let by_method = &program["verified_by_method_percent"];
    let suppressed = program["retries_suppressed"].as_object().map(suppressed).unwrap_or_default();
    [
        word(&program["harness"]),
        word(&program["version"]),
        number(&program["deliveries"]),
        percent(&program["verified_percent"]),
        percent(&by_method["echo"]),
        percent(&by_method["file"]),
        percent(&by_method["mcp"]),
        percent(&program["unverified_percent"]),
        percent(&program["failed_percent"]),
        number(&program["verify_ms"]["p50"]),
        number(&program["verify_ms"]["p95"]),
        number(&program["attempts_per_delivery"]),
        suppressed,
    ]
}

fn suppressed(reasons: &Map<String, Value>) -> String {
    reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

fn notes(program: &Value) -> Vec<String> {
    let adoption = |name: &str, share: &Value| Some(format!("{name} acks: {} %", share.as_f64()?));
    let learned = &program["learned"];
    let echo = (learned["echo_reliable"] == false).then(|| "learned: no echo".to_owned());
    let window = learned["echo_window_ms"].as_u64().map(|window| format!("echo window: {} s", window / 1000));
    let adopted =
        [adoption("file", &program["file_ack_percent"]), adoption("mcp", &program["mcp_ack_percent"]), window, echo];
    let first: Vec<String> = adopted.into_iter().flatten().collect();
    let recommended = program["recommendations"].as_array().into_iter().flatten();
    let recommended = recommended.filter_map(Value::as_str).map(|text| format!("recommended: {text}"));
    (!first.is_empty()).then(|| first.join(", ")).into_iter().chain(recommended).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_the_figures_and_below_it_stands_what_follows() {
        let program = json!({
            "harness": "claude", "version": "1-2", "deliveries": 20, "verified_percent": 75.0,
            "verified_by_method_percent": { "echo": 75.0 }, "unverified_percent": 20.0, "failed_percent": 5.0,
            "verify_ms": { "p50": 8, "p95": 15 }, "attempts_per_delivery": 1.2,
            "retries_suppressed": { "not_at_prompt": 1 }, "file_ack_percent": 94.0, "mcp_ack_percent": null,
            "learned": { "echo_reliable": false, "echo_window_ms": 5000 },
            "recommendations": ["file acks 94 %: echo window 5 s"],
        });
        let text = table(&[program]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("PROGRAM  VERSION  DELIVERIES  VERIFIED"), "{text}");
        let cells: Vec<&str> = lines[1].split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let expected =
            ["claude", "1-2", "20", "75 %", "75 %", "-", "-", "20 %", "5 %", "8", "15", "1.2", "not_at_prompt 1"];
        assert_eq!(cells, expected);
        assert_eq!(lines[2], "  file acks: 94 %, echo window: 5 s, learned: no echo");
        assert_eq!(lines[3], "  recommended: file acks 94 %: echo window 5 s");
        assert_eq!(table(&[]).lines().count(), 1);
    }
}
