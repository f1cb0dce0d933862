//! Golden files on disk: reading, comparing, writing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// `write` replaces the golden files by what this run gives, `merge` adds it to them. Otherwise they are compared.
const VARIABLE: &str = "RELAY_GOLDEN";
/// Beside the sources of this package.
const FOLDER: &str = "golden";
/// Begins a line that not every run yields.
const OPTIONAL: &str = "? ";
const REQUIRED: &str = "  ";
/// Characters of two lines that are shown around their first difference.
const SHOWN: usize = 160;

/// Compares lines with the golden file `tests/golden/<name>.txt`.
///
/// If files share a folder below `golden`, a line of one may appear for the others: which of its states a client
/// happens to be shown is a matter of time, the states are not.
///
/// # Errors
/// When a required line is missing or a line is not in the files; the error shows both side by side.
pub fn compare(name: &str, lines: &[String]) -> Result<()> {
    let path = path(name);
    match std::env::var(VARIABLE).ok().as_deref() {
        None => {
            let difference = Golden::read(&path)?.with_siblings(&path)?.difference(lines);
            if !difference.is_empty() {
                bail!("what clients see is not what tests/golden/{name}.txt says:\n{difference}");
            }
            Ok(())
        }
        Some("write") => Golden::recorded(lines).write(&path),
        Some("merge") => {
            let golden = if path.exists() { Golden::read(&path)?.merged(lines) } else { Golden::recorded(lines) };
            golden.write(&path)
        }
        Some(other) => bail!("{VARIABLE} is {other:?}: write, merge or unset"),
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(FOLDER).join(format!("{name}.txt"))
}

/// The lines of a file in their order, each with whether every run must yield it.
#[derive(Debug, Default, PartialEq)]
struct Golden(Vec<(String, bool)>);

impl Golden {
    fn recorded(lines: &[String]) -> Self {
        let mut seen = BTreeSet::new();
        Self(lines.iter().filter(|line| seen.insert(*line)).map(|line| (line.clone(), true)).collect())
    }

    fn read(path: &Path) -> Result<Self> {
        Self::parse(&std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?)
    }

    /// With the lines of the other files of its folder as optional ones.
    fn with_siblings(mut self, path: &Path) -> Result<Self> {
        let folder = path.parent().context("a folder")?;
        if folder.ends_with(FOLDER) {
            return Ok(self);
        }
        let mut known: BTreeSet<String> = self.0.iter().map(|(line, _)| line.clone()).collect();
        for entry in std::fs::read_dir(folder)? {
            let lines = Self::read(&entry?.path())?.0.into_iter().map(|(line, _)| line);
            self.0.extend(lines.filter(|line| known.insert(line.clone())).map(|line| (line, false)));
        }
        Ok(self)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut lines = Vec::new();
        for line in text.lines() {
            if let Some(line) = line.strip_prefix(REQUIRED) {
                lines.push((line.to_owned(), true));
            } else {
                let line = line.strip_prefix(OPTIONAL).with_context(|| format!("neither required nor ?: {line}"))?;
                lines.push((line.to_owned(), false));
            }
        }
        Ok(Self(lines))
    }

    /// Together with another run: new lines are optional, and so are those that it did not yield.
    fn merged(self, lines: &[String]) -> Self {
        let fresh: BTreeSet<&String> = lines.iter().collect();
        let known: BTreeSet<String> = self.0.iter().map(|(line, _)| line.clone()).collect();
        let kept = self.0.into_iter().map(|(line, required)| {
            let required = required && fresh.contains(&line);
            (line, required)
        });
        let added = fresh.iter().filter(|line| !known.contains(**line)).map(|line| ((*line).clone(), false));
        Self(kept.chain(added).collect())
    }

    fn write(&self, path: &Path) -> Result<()> {
        let mut text = String::new();
        for (line, required) in &self.0 {
            writeln!(text, "{}{line}", if *required { REQUIRED } else { OPTIONAL })?;
        }
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Empty if the lines are those of the file.
    fn difference(&self, lines: &[String]) -> String {
        let known: BTreeMap<&str, bool> = self.0.iter().map(|(line, required)| (line.as_str(), *required)).collect();
        let fresh: BTreeSet<&str> = lines.iter().map(String::as_str).collect();
        let mut missing: Vec<&str> = known
            .iter()
            .filter(|(line, required)| **required && !fresh.contains(*line))
            .map(|(line, _)| *line)
            .collect();
        let mut text = String::new();
        for added in fresh.iter().filter(|line| !known.contains_key(*line)) {
            // A changed line is shown with the one that it most likely replaces.
            let nearest = missing.iter().copied().max_by_key(|line| likeness(line, added));
            match nearest.filter(|line| likeness(line, added) > 0) {
                Some(line) => {
                    missing.retain(|other| *other != line);
                    let (expected, found) = around_first_difference(line, added);
                    let _ = writeln!(text, "changed:\n  golden  {expected}\n  now     {found}");
                }
                None => {
                    let _ = writeln!(text, "not in the golden file:\n  now     {added}");
                }
            }
        }
        for line in missing {
            let _ = writeln!(text, "did not appear:\n  golden  {line}");
        }
        text
    }
}

/// Length of what two lines have in common at both ends; 0 unless they begin with the same two words.
fn likeness(one: &str, other: &str) -> usize {
    if !one.split(' ').take(2).eq(other.split(' ').take(2)) {
        return 0;
    }
    let start = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    let end = one.bytes().rev().zip(other.bytes().rev()).take_while(|(a, b)| a == b).count();
    start + end
}

/// Both lines, shortened to the surroundings of their first difference if they are long.
fn around_first_difference(one: &str, other: &str) -> (String, String) {
    let same = one.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    let shown = |line: &str| {
        let from = same.saturating_sub(SHOWN / 2);
        // The beginning says which route it is.
        let head: String = line.chars().take(from.min(SHOWN / 2)).collect();
        let rest: String = line.chars().skip(from).take(2 * SHOWN).collect();
        if from > 0 { format!("{head} … {rest}") } else { rest }
    };
    (shown(one), shown(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn required_lines_must_appear_and_others_must_be_known() -> Result<()> {
        let golden = Golden::parse("  GET /a 200\n? GET /b 200\n")?;
        assert_eq!(golden.difference(&lines("GET /a 200")), "");
        assert_eq!(golden.difference(&lines("GET /b 200\nGET /a 200\nGET /a 200")), "");
        assert!(golden.difference(&lines("GET /b 200")).contains("did not appear:\n  golden  GET /a 200"));
        assert!(golden.difference(&lines("GET /a 200\nPUT /c 200")).contains("not in the golden file"));
        assert!(
            golden.difference(&lines("GET /a 201")).contains("changed:\n  golden  GET /a 200\n  now     GET /a 201")
        );
        Ok(())
    }

    #[test]
    fn a_merge_keeps_what_every_run_yielded_as_required() -> Result<()> {
        let golden = Golden::recorded(&lines("one\ntwo\ntwo")).merged(&lines("two\nthree"));
        assert_eq!(golden, Golden::parse("? one\n  two\n? three\n")?);
        Ok(())
    }
}
