//! A file past 500 lines has a second subject somewhere.

use super::Source;

const LONGEST: usize = 500;

/// Files that may be longer, each with the reason.
const ALLOWED: &[(&str, &str)] = &[];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources.iter().filter(|source| source.is_rust()) {
        let lines = source.text.lines().count();
        let allowed = ALLOWED.iter().any(|(path, _)| *path == source.path);
        if lines > LONGEST && !allowed {
            findings.push(format!(
                "{}: {lines} lines; past {LONGEST}, split it by subject (or allow it with a reason in {})",
                source.path,
                file!()
            ));
        }
        if allowed && lines <= LONGEST {
            findings.push(format!("{}: no longer needs its place in {}", source.path, file!()));
        }
    }
}
