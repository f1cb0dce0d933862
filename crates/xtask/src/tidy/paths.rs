//! No file may name a place on the machine it was written on.

use super::Source;

/// Starts of absolute paths that exist on one machine only.
const PLACES: [&str; 4] = ["/home/", "/Users/", "/root/", "/work/"];

/// File that may name them: this rule.
const OWN: &str = "crates/xtask/src/tidy/paths.rs";

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources.iter().filter(|source| source.path != OWN) {
        for (index, line) in source.text.lines().enumerate() {
            if let Some(place) = PLACES.iter().find(|place| names_place(line, place)) {
                let number = index + 1;
                findings.push(format!("{}:{number}: {place}…: a path of one machine", source.path));
            }
        }
    }
}

/// Returns whether `line` has an absolute path that begins with `place`, not merely a longer path or URL that contains
/// it.
fn names_place(line: &str, place: &str) -> bool {
    line.match_indices(place).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !(c.is_alphanumeric() || "/.-_}$>*~".contains(c)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_count() {
        assert!(names_place("cd /work/x", "/work/"));
        assert!(names_place("\"/home/me/x\"", "/home/"));
        assert!(!names_place("https://host/home/x", "/home/"));
        assert!(!names_place("$DIR/work/x", "/work/"));
    }
}
