//! Names of decision records and changelog fragments.

use super::Source;

const ADR_FOLDER: &str = "docs/adr/";
const CHANGES_FOLDER: &str = "changes/unreleased/";

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let mut numbers: Vec<&str> = Vec::new();
    for source in sources {
        if let Some(name) = source.path.strip_prefix(ADR_FOLDER) {
            match adr_number(name) {
                Some(number) if numbers.contains(&number) => {
                    findings.push(format!("{}: the number {number} is taken", source.path));
                }
                Some(number) => numbers.push(number),
                None if name == "README.md" => {}
                None => findings.push(format!("{}: name it 0001-what-was-decided.md", source.path)),
            }
            if !source.text.starts_with("# ") {
                findings.push(format!("{}: its first line is its title, `# …`", source.path));
            }
        }
        if let Some(name) = source.path.strip_prefix(CHANGES_FOLDER) {
            if name == ".gitkeep" || name == "README.md" {
                continue;
            }
            if !name.strip_suffix(".md").is_some_and(is_kebab) {
                findings.push(format!("{}: name it what-changed.md", source.path));
            }
            if source.text.trim().is_empty() {
                findings.push(format!("{}: it says nothing", source.path));
            }
        }
    }
}

/// `0001` of `0001-what-was-decided.md`.
fn adr_number(name: &str) -> Option<&str> {
    let (number, title) = name.strip_suffix(".md")?.split_once('-')?;
    let numbered = number.len() == 4 && number.bytes().all(|byte| byte.is_ascii_digit());
    (numbered && is_kebab(title)).then_some(number)
}

fn is_kebab(text: &str) -> bool {
    let plain =
        |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    text.split('-').all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adr_names() {
        assert_eq!(adr_number("0007-replay-threshold.md"), Some("0007"));
        for wrong in ["7-x.md", "0007.md", "0007-.md", "0007-Upper.md", "0007_x.md", "0007-x.txt"] {
            assert_eq!(adr_number(wrong), None, "{wrong}");
        }
    }
}
