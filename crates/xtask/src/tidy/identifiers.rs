//! Names of code that the guides mention exist.

use std::collections::HashSet;

use super::Source;

/// Documents that send a reader to types, functions, statements and constraints. Of the decisions in [`DECISIONS`] only
/// paths such as `Type::function` are checked: their other names may be those of Postgres, NATS or libraries.
const GUIDES: [&str; 5] =
    ["CONTRIBUTING.md", "docs/architecture.md", "docs/background-work.md", "docs/bounds.md", "docs/tour.md"];

const DECISIONS: &str = "docs/adr/";

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let code = sources.iter().filter(|source| !source.path.ends_with(".md"));
    let known: HashSet<&str> = code.flat_map(|source| words(&source.text)).collect();
    for guide in sources {
        let is_checked = |name: &str| {
            let is_decision = guide.path.starts_with(DECISIONS) && name.contains("::");
            is_decision || GUIDES.contains(&guide.path.as_str())
        };
        for (index, line) in guide.text.lines().enumerate() {
            let names = identifiers(line).filter(|name| is_checked(name));
            for name in names.filter(|name| !words(name).all(|word| known.contains(word))) {
                findings.push(format!("{}:{}: no code has the name `{name}`", guide.path, index + 1));
            }
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// Quoted names such as `ConnectionState::step` and `written_rows!`, without paths, commands and values.
fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.map(|name| name.trim_end_matches('!')).filter(|name| {
        let is_name = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphabetic())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        name.split("::").all(is_name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_code_has_is_found() {
        let findings_of = |document: &str, line: &str| {
            let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
            let mut findings = Vec::new();
            let code = source("a.rs", "impl Store { fn commit_batch() {} }");
            check(&[source(document, line), code, source("b.md", "Gone")], &mut findings);
            findings.len()
        };
        let guide = "docs/tour.md";
        assert_eq!(findings_of(guide, "`Store::commit_batch`, then `commit_batch!`; see `crates/x.rs` and `a b`"), 0);
        assert_eq!(findings_of(guide, "`Store::Gone` and `flush`"), 2);
        assert_eq!(findings_of("docs/adr/0001-x.md", "`Store::Gone` and `flush`"), 1);
    }
}
