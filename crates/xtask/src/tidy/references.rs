//! Files that comments and documents refer to exist.

use std::collections::BTreeSet;

use super::Source;

/// Endings of files that are worth a reference.
const ENDINGS: [&str; 9] = [".rs", ".md", ".sql", ".yaml", ".toml", ".json", ".py", ".mjs", ".sh"];

/// Files that exist at run time only, or in another project: `dev.json` of `cargo xtask dev`, published packages.
const ELSEWHERE: [&str; 7] = [
    "dev.json",
    "package.json",
    "broker.rs",
    "values.yaml",
    "rules.yaml",
    "docker-compose.yaml",
    "0001-what-was-decided.md",
];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let known: BTreeSet<&str> = sources.iter().map(|source| source.path.as_str()).collect();
    for source in sources {
        let markdown = source.path.ends_with(".md");
        // Fragments of a change name files as they were then.
        if source.path.starts_with("changes/") || source.path == "CHANGELOG.md" || !(markdown || source.is_rust()) {
            continue;
        }
        for (index, line) in source.text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//");
            let Some(text) = (if markdown { Some(line) } else { comment }) else { continue };
            for name in references(text).filter(|name| !resolves(name, &source.path, &known)) {
                findings.push(format!("{}:{}: `{name}` does not exist", source.path, index + 1));
            }
            if markdown {
                for link in relative_links(line).filter(|link| !links_to(link, &source.path, sources)) {
                    findings.push(format!("{}:{}: the link to `{link}` leads nowhere", source.path, index + 1));
                }
            }
        }
    }
}

/// Words of `text` that look like a file of this repository: with a folder, or a document by its name.
fn references(text: &str) -> impl Iterator<Item = &str> {
    let part_of_path = |c: char| c.is_ascii_alphanumeric() || "_-./:@".contains(c);
    text.split(move |c| !part_of_path(c)).filter_map(|word| {
        let word = word.trim_end_matches(['.', ':']);
        let named = ENDINGS.iter().any(|ending| word.len() > ending.len() && word.ends_with(ending));
        let url = word.contains("//") || word.contains(':') || word.contains('@') || word.starts_with(['/', '.', '-']);
        let known_elsewhere = ELSEWHERE.iter().any(|name| word.rsplit('/').next() == Some(name));
        let path = word.contains('/') || word.ends_with(".md");
        (named && path && !url && !known_elsewhere).then_some(word)
    })
}

/// Returns true if `name` is a file beside `from`, below one of its parents' `docs`, in the root, or in a crate that is
/// named first.
fn resolves(name: &str, from: &str, known: &BTreeSet<&str>) -> bool {
    let beside = from.rsplit_once('/').map_or(name.to_owned(), |(folder, _)| format!("{folder}/{name}"));
    let places =
        [name.to_owned(), beside, format!("docs/{name}"), format!("crates/{name}"), format!("services/{name}")];
    places.iter().any(|place| known.contains(place.as_str()))
        // Beside a file that was named with its folder just before, or within the crate of the comment.
        || known.iter().any(|path| path.strip_suffix(name).is_some_and(|head| head.ends_with('/')))
}

/// Targets of `[text](target)` inside this repository, without anchors.
fn relative_links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let inside = targets.filter(|target| !target.contains("://") && !target.starts_with(['#', '/']));
    inside.map(|target| target.split('#').next().unwrap_or(target))
}

/// Returns whether a link from the file `from` names a tracked file or a folder of one.
fn links_to(link: &str, from: &str, sources: &[Source]) -> bool {
    let mut folder: Vec<&str> = from.split('/').collect();
    folder.pop();
    for part in link.split('/').filter(|part| !part.is_empty() && *part != ".") {
        if part == ".." {
            folder.pop();
        } else {
            folder.push(part);
        }
    }
    let target = folder.join("/");
    sources
        .iter()
        .any(|source| source.path.strip_prefix(&target).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let sources = [
            Source { path: path.into(), text: text.into() },
            Source { path: "docs/glossary.md".into(), text: String::new() },
            Source { path: "crates/store/src/pool.rs".into(), text: String::new() },
        ];
        let mut findings = Vec::new();
        check(&sources, &mut findings);
        findings
    }

    #[test]
    fn existing_files_are_found_by_any_usual_path() {
        for text in ["crates/store/src/pool.rs", "`store/src/pool.rs`", "[words](glossary.md)", "see https://a/b.md"] {
            assert_eq!(findings_of("docs/tour.md", text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn a_missing_file_is_reported() {
        assert_eq!(findings_of("docs/tour.md", "see `crates/store/src/gone.rs`.").len(), 1);
        assert_eq!(findings_of("crates/store/src/pool.rs", "//! (contract: node.md 6)").len(), 1);
    }

    #[test]
    fn links_are_followed_from_their_page() {
        assert_eq!(findings_of("docs/adr/README.md", "[a](../glossary.md#seq) [b](..) [c](https://x/y)").len(), 0);
        assert_eq!(findings_of("docs/adr/README.md", "[a](glossary.png)").len(), 1);
    }

    #[test]
    fn code_is_not_read() {
        assert_eq!(findings_of("crates/store/src/pool.rs", "let name = \"gone/x.md\";").len(), 0);
    }
}
