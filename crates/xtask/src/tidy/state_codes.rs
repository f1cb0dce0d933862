//! States in SQL are written as constants of `crates/store/src/codes.rs`, so that a number cannot drift from its enum.

use super::Source;

const STORE: &str = "crates/store/src/";
/// Columns of `migrations/` that hold the code of an enum of `crates/domain`.
const STATE_COLUMNS: [&str; 5] = ["type", "source_kind", "mode", "reason", "state"];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources.iter().filter(|source| source.is_rust() && source.path.starts_with(STORE)) {
        for (number, line) in source.code_lines() {
            if let Some(column) = STATE_COLUMNS.into_iter().find(|column| compares_with_digits(line, column)) {
                findings.push(format!(
                    "{}:{number}: {column} is compared with a number: use a constant of codes.rs",
                    source.path
                ));
            }
        }
    }
}

/// Returns true if the line compares the column with a number, or sets it to one.
fn compares_with_digits(line: &str, column: &str) -> bool {
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    line.match_indices(column).any(|(at, _)| {
        let (before, rest) = (&line[..at], line[at + column.len()..].trim_start());
        let operand = ["<>", "!=", "<=", ">=", "=", "<", ">", "IN", "NOT IN", "BETWEEN"]
            .into_iter()
            .find_map(|operator| rest.strip_prefix(operator));
        let compares = operand
            .is_some_and(|operand| operand.trim_start_matches([' ', '(']).starts_with(|c: char| c.is_ascii_digit()));
        compares && !before.ends_with(is_part_of_name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(&[Source { path: path.into(), text: text.into() }], &mut findings);
        findings
    }

    #[test]
    fn a_number_for_a_state_is_found_with_its_line() {
        let found = findings("crates/store/src/a.rs", "const A: &str = \"\n WHERE x.state = 4\";");
        assert_eq!(found, ["crates/store/src/a.rs:2: state is compared with a number: use a constant of codes.rs"]);
        for line in
            ["state IN (1, 2)", "d.source_kind <> 0", "c.type NOT IN (1)", "SET reason = 2", "state BETWEEN 1 AND 4"]
        {
            assert_eq!(findings("crates/store/src/a.rs", line).len(), 1, "{line}");
        }
    }

    #[test]
    fn other_numbers_and_constants_are_fine() {
        for line in ["x.state = {DEAD_LETTERED}", "state = $4", "real_state = 4", "// state = 4", "reason = 'rejected'"]
        {
            assert!(findings("crates/store/src/a.rs", line).is_empty(), "{line}");
        }
        assert!(findings("crates/store/tests/a.rs", "state = 4").is_empty());
    }
}
