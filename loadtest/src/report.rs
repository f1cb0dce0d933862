//! Results of a run, as tables and as JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::drive::SendTotals;
use crate::stats::Latency;
use crate::table::Table;
use crate::usage::Cpu;

/// Result of one measured window.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    /// Name of the window, such as `saturate 100`.
    pub(crate) run: String,
    /// Description of the setup.
    pub(crate) notes: Vec<String>,
    /// Problems of the window, one line each.
    pub(crate) problems: Vec<String>,
    /// Number of accepted requests (or publishes, or rows).
    pub(crate) accepted: u64,
    /// Number of deliveries received (for `pg`: rows committed).
    pub(crate) delivered: u64,
    /// Time from the first request to the last delivery.
    pub(crate) seconds: f64,
    /// `delivered ÷ seconds`; absent where it has no meaning.
    pub(crate) per_second: Option<f64>,
    /// Latency from just before writing the request to the parsed frame at the receiver.
    pub(crate) latency: Option<Latency>,
    /// Latency from just before writing the request to its 2xx.
    pub(crate) answer: Option<Latency>,
    /// CPU time within the window, in seconds.
    pub(crate) cpu: Cpu,
    /// Resident memory at the end of the window.
    pub(crate) resident_kib: BTreeMap<String, u64>,
    /// Further measurements by name.
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Row {
    /// Returns the CPU seconds of the stack per 100 000 deliveries.
    pub(crate) fn cpu_per_100k(&self) -> Option<f64> {
        per_100k(self.cpu.stack_total(), self.delivered)
    }

    /// Adds the results of the sender.
    pub(crate) fn add_sent(&mut self, sent: SendTotals) {
        self.accepted = sent.accepted;
        self.answer = Latency::from_micros(sent.took);
        if sent.failed > 0 {
            let first = sent.first_failure.unwrap_or_default();
            self.problems.push(format!("{} requests failed, first: {first}", sent.failed));
        }
        if let Some(late) = Latency::from_micros(sent.late) {
            self.notes.push(format!("sent late p99 {:.1} ms", late.p99_ms));
        }
    }
}

fn per_100k(seconds: f64, count: u64) -> Option<f64> {
    (count > 0).then(|| seconds * 100_000.0 / count as f64)
}

/// Direction in which a measurement improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// Measurement with a target.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ratio {
    /// Line of the project's speed targets.
    pub(crate) target: &'static str,
    /// Description of the measurement.
    pub(crate) what: String,
    /// Measured value.
    pub(crate) value: f64,
    /// Value required for a release.
    pub(crate) ship: f64,
    /// Value aimed for.
    pub(crate) goal: f64,
    /// Direction in which the value improves.
    pub(crate) better: Better,
}

impl Ratio {
    fn verdict(&self) -> &'static str {
        let reaches = |bar: f64| match self.better {
            Better::Higher => self.value >= bar,
            Better::Lower => self.value <= bar,
        };
        match (reaches(self.goal), reaches(self.ship)) {
            (true, _) => "goal reached",
            (false, true) => "shippable",
            (false, false) => "missed",
        }
    }
}

/// Results of one run of the program.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Command line arguments.
    pub(crate) arguments: Vec<String>,
    /// `debug` or `release`.
    pub(crate) build: &'static str,
    /// Number of cores of the machine.
    pub(crate) cores: usize,
    /// Windows in order of execution.
    pub(crate) rows: Vec<Row>,
    /// Measurements with targets.
    pub(crate) ratios: Vec<Ratio>,
}

impl Report {
    /// Creates an empty report.
    pub(crate) fn new(arguments: Vec<String>) -> Self {
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        Self { arguments, build, cores, ..Self::default() }
    }

    /// Adds a window, prints it, and returns its index.
    pub(crate) fn add(&mut self, row: Row) -> usize {
        let latency = row.latency.unwrap_or_default();
        eprintln!(
            "{}: {} delivered in {:.2} s, {}/s, p50 {:.2} ms, p99 {:.2} ms {}",
            row.run,
            row.delivered,
            row.seconds,
            number(row.per_second, 0),
            latency.p50_ms,
            latency.p99_ms,
            row.problems.join("; ")
        );
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Returns whether anything was lost, refused, repeated or reordered.
    pub(crate) fn has_problems(&self) -> bool {
        self.rows.iter().any(|row| !row.problems.is_empty())
    }

    /// Renders the tables.
    pub(crate) fn render(&self) -> String {
        let mut out = format!("{} build, {} cores; stack and generator share them\n\n", self.build, self.cores);
        out.push_str(&self.main_table());
        out.push_str("\nCPU seconds by process, and what the machine did besides (% of one core)\n\n");
        out.push_str(&self.cpu_table());
        if !self.ratios.is_empty() {
            out.push('\n');
            out.push_str(&self.ratio_table());
        }
        for row in &self.rows {
            for problem in &row.problems {
                out.push_str(&format!("\nPROBLEM in {}: {problem}", row.run));
            }
        }
        out
    }

    fn main_table(&self) -> String {
        let mut table = Table::new([
            "run",
            "delivered",
            "seconds",
            "delivered/s",
            "p50 ms",
            "p99 ms",
            "2xx p50",
            "2xx p99",
            "CPU s/100k",
            "generator CPU s/100k",
            "RSS MiB",
            "notes",
        ]);
        for row in &self.rows {
            let ms = |latency: Option<Latency>, pick: fn(Latency) -> f64| number(latency.map(pick), 2);
            let resident: u64 = row.resident_kib.values().sum();
            table.push([
                row.run.clone(),
                row.delivered.to_string(),
                number(Some(row.seconds), 2),
                number(row.per_second, 0),
                ms(row.latency, |latency| latency.p50_ms),
                ms(row.latency, |latency| latency.p99_ms),
                ms(row.answer, |latency| latency.p50_ms),
                ms(row.answer, |latency| latency.p99_ms),
                number(row.cpu_per_100k(), 1),
                number(per_100k(row.cpu.generator, row.delivered), 1),
                number((resident > 0).then(|| resident as f64 / 1024.0), 0),
                row.notes.join("; "),
            ]);
        }
        table.render()
    }

    fn cpu_table(&self) -> String {
        let names: Vec<&String> = {
            let mut all: Vec<_> = self.rows.iter().flat_map(|row| row.cpu.stack.keys()).collect();
            all.sort();
            all.dedup();
            all
        };
        let header = ["run"].into_iter().chain(names.iter().map(|name| name.as_str()));
        let mut table = Table::new(header.chain(["generator", "others %", "RSS MiB by process"]));
        for row in &self.rows {
            let resident = row.resident_kib.iter().map(|(name, kib)| format!("{name} {}", kib / 1024));
            let others = (row.cpu.wall_seconds > 0.0).then(|| row.cpu.others / row.cpu.wall_seconds * 100.0);
            let cells = [row.run.clone()].into_iter();
            let cells = cells.chain(names.iter().map(|name| number(row.cpu.stack.get(*name).copied(), 2)));
            let last = [number(Some(row.cpu.generator), 2), number(others, 0), resident.collect::<Vec<_>>().join(", ")];
            table.push(cells.chain(last));
        }
        table.render()
    }

    fn ratio_table(&self) -> String {
        let mut table = Table::new(["target", "value", "ship", "goal", "verdict", "what"]);
        for ratio in &self.ratios {
            table.push([
                ratio.target.to_owned(),
                number(Some(ratio.value), 2),
                ratio.ship.to_string(),
                ratio.goal.to_string(),
                ratio.verdict().to_owned(),
                ratio.what.clone(),
            ]);
        }
        table.render()
    }
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(value: f64, better: Better, ship: f64, goal: f64) -> Ratio {
        Ratio { target: "S1", what: "a / b".into(), value, ship, goal, better }
    }

    #[test]
    fn a_verdict_depends_on_the_direction_of_the_metric() {
        assert_eq!(ratio(2.0, Better::Higher, 1.0, 2.0).verdict(), "goal reached");
        assert_eq!(ratio(1.5, Better::Higher, 1.0, 2.0).verdict(), "shippable");
        assert_eq!(ratio(0.9, Better::Higher, 1.0, 2.0).verdict(), "missed");
        assert_eq!(ratio(1.9, Better::Lower, 4.0, 2.0).verdict(), "goal reached");
        assert_eq!(ratio(5.0, Better::Lower, 4.0, 2.0).verdict(), "missed");
    }

    #[test]
    fn a_report_shows_cost_memory_and_failures() {
        let row = Row {
            run: "saturate 100".into(),
            problems: vec!["3 deliveries lost".into()],
            delivered: 50_000,
            seconds: 10.0,
            per_second: Some(5000.0),
            latency: Some(Latency { p50_ms: 1.5, p99_ms: 20.25, max_ms: 30.0 }),
            cpu: Cpu {
                stack: BTreeMap::from([("nats".into(), 2.0), ("gateway-1".into(), 3.0)]),
                generator: 1.0,
                others: 0.5,
                wall_seconds: 10.0,
            },
            resident_kib: BTreeMap::from([("nats".into(), 20 * 1024)]),
            ..Row::default()
        };
        assert_eq!(row.cpu_per_100k(), Some(10.0));
        let report =
            Report { rows: vec![row], ratios: vec![ratio(0.5, Better::Higher, 1.0, 2.0)], ..Report::default() };
        assert!(report.has_problems());
        let text = report.render();
        for part in ["saturate 100", "5000", "20.25", "nats 20", "missed", "PROBLEM in saturate 100: 3 deliveries lost"]
        {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(serde_json::to_string(&report).unwrap().contains("\"p99_ms\":20.25"));
    }

    #[test]
    fn failures_of_the_sender_are_problems() {
        let mut row = Row::default();
        row.add_sent(SendTotals {
            accepted: 5,
            failed: 1,
            first_failure: Some("503".into()),
            took: vec![1000],
            ..SendTotals::default()
        });
        assert_eq!(row.problems, ["1 requests failed, first: 503"]);
        assert_eq!(row.answer.unwrap().p50_ms, 1.0);
    }
}
