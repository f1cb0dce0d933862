//! Names of code that the guides mention exist.

use std::collections::HashSet;

use super::Source;

/// Documents that send a reader to types, functions, statements and constraints.
const GUIDES: [&str; 5] =
    ["CONTRIBUTING.md", "docs/architecture.md", "docs/background-work.md", "docs/bounds.md", "docs/tour.md"];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let code = sources.iter().filter(|source| !source.path.ends_with(".md"));
    let known: HashSet<&str> = code.flat_map(|source| words(&source.text)).collect();
    for guide in sources.iter().filter(|source| GUIDES.contains(&source.path.as_str())) {
        for (index, line) in guide.text.lines().enumerate() {
            for name in identifiers(line).filter(|name| !words(name).all(|word| known.contains(word))) {
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
        let findings_of = |line: &str| {
            let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
            let mut findings = Vec::new();
            let code = source("a.rs", "impl Store { fn commit_batch() {} }");
            check(&[source("docs/tour.md", line), code, source("b.md", "Gone")], &mut findings);
            findings.len()
        };
        assert_eq!(findings_of("`Store::commit_batch`, then `commit_batch!`; see `crates/x.rs` and `a b`"), 0);
        assert_eq!(findings_of("`Store::Gone` and `flush`"), 2);
    }
}
