//! Files of a crate do not import each other in a circle, so that each can be read after those that it names.
//!
//! A module and its children may name each other: a folder is read as a whole.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;

/// A terminal and the tree of its processes know each other; nothing else of the crate does.
const EXEMPT: [&str; 1] = ["crates/pty/"];

/// Modules of a crate by their path, and the modules that each names.
type Imports = BTreeMap<String, BTreeSet<String>>;

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let mut crates: BTreeMap<&str, Vec<(String, &Source)>> = BTreeMap::new();
    let checked = |source: &&Source| source.is_rust() && !source.is_test_module() && is_checked(&source.path);
    for source in sources.iter().filter(checked) {
        let Some((root, file)) = source.path.split_once("/src/") else { continue };
        crates.entry(root).or_default().push((module_of(file), source));
    }
    for (root, files) in crates {
        let known: BTreeSet<&str> = files.iter().map(|(module, _)| module.as_str()).collect();
        let imports = files.iter().map(|(module, source)| (module.clone(), imported(module, source, &known))).collect();
        for circle in circles(&imports) {
            findings.push(format!("{root}: these files import each other in a circle: {}", circle.join(", ")));
        }
    }
}

fn is_checked(path: &str) -> bool {
    path.starts_with("crates/") && !EXEMPT.iter().any(|place| path.starts_with(place))
}

/// Path of the module in a file of `src`; empty for the root.
fn module_of(file: &str) -> String {
    let name = file.trim_end_matches(".rs");
    let name = ["mod", "lib", "main"].into_iter().find_map(|root| {
        let folder = name.strip_suffix(root)?;
        (folder.is_empty() || folder.ends_with('/')).then_some(folder.trim_end_matches('/'))
    });
    name.unwrap_or(file.trim_end_matches(".rs")).replace('/', "::")
}

/// Returns the modules that a file names by paths from `crate`, `super` or `self`, apart from its parents and children.
fn imported(module: &str, source: &Source, known: &BTreeSet<&str>) -> BTreeSet<String> {
    let code: Vec<&str> = source.production_lines().map(|(_, line)| line).collect();
    let code = code.join(" ");
    let mut named = BTreeSet::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start).filter(|(at, _)| begins_path(&code[..*at])) {
            expand(&code[at..], &mut String::new(), &mut named);
        }
    }
    let targets = named.iter().filter_map(|path| resolve(module, path, known));
    targets.filter(|target| *target != module && !are_related(module, target)).collect()
}

fn begins_path(before: &str) -> bool {
    !before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':' || c == '$')
}

/// Collects the paths of a tree such as `crate::{a::b, c}` at the start of `text`. Returns the text behind it.
fn expand<'a>(text: &'a str, prefix: &mut String, paths: &mut BTreeSet<String>) -> &'a str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(text.len());
    let length = prefix.len();
    prefix.push_str(&text[..end]);
    let mut rest = &text[end..];
    match rest.strip_prefix('{').filter(|_| prefix.ends_with("::")) {
        None => {
            paths.insert(prefix.clone());
        }
        Some(mut inner) => loop {
            inner = expand(inner.trim_start(), prefix, paths);
            // Past an alias, to the next branch or the end of this one.
            inner = &inner[inner.find([',', '}', ';']).unwrap_or(inner.len())..];
            let more = inner.strip_prefix(',').map(str::trim_start).filter(|more| !more.starts_with('}'));
            if let Some(more) = more {
                inner = more;
            } else {
                rest = inner.trim_start_matches([',', ' ']).strip_prefix('}').unwrap_or("");
                break;
            }
        },
    }
    prefix.truncate(length);
    rest
}

/// Returns the module that a path leads into: its longest start that is one.
fn resolve(module: &str, path: &str, known: &BTreeSet<&str>) -> Option<String> {
    let mut place: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    for part in path.split("::") {
        match part {
            "crate" => place.clear(),
            "super" => {
                place.pop();
            }
            "self" => {}
            part => place.push(part),
        }
    }
    (1..=place.len()).rev().map(|length| place[..length].join("::")).find(|start| known.contains(start.as_str()))
}

/// Returns whether one of the modules contains the other.
fn are_related(a: &str, b: &str) -> bool {
    let within = |outer: &str, inner: &str| outer.is_empty() || inner.starts_with(&format!("{outer}::"));
    within(a, b) || within(b, a)
}

/// Returns the largest sets of modules that reach each other.
fn circles(imports: &Imports) -> Vec<Vec<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|from| (from.as_str(), reach(from, imports))).collect();
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for (from, targets) in reached.iter().filter(|(from, targets)| targets.contains(*from)) {
        let circle: Vec<&str> = targets.iter().copied().filter(|target| reached[target].contains(from)).collect();
        if seen.insert(circle.clone()) {
            circles.push(circle);
        }
    }
    circles
}

fn reach<'a>(from: &'a str, imports: &'a Imports) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = vec![from];
    while let Some(module) = open.pop() {
        open.extend(imports[module].iter().map(String::as_str).filter(|next| reached.insert(*next)));
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(files: &[(&str, &str)]) -> Vec<String> {
        let source =
            |(path, text): &(&str, &str)| Source { path: format!("crates/x/src/{path}"), text: (*text).into() };
        let mut findings = Vec::new();
        check(&files.iter().map(source).collect::<Vec<_>>(), &mut findings);
        findings
    }

    #[test]
    fn a_circle_is_found_through_any_path_and_named_once() {
        let circle = findings_of(&[
            ("a.rs", "use std::fmt;\nuse crate::{\n    b::{Own as Other, deep::Two},\n    d::Thing,\n};"),
            ("b/mod.rs", "pub struct Own;"),
            ("b/deep.rs", "fn f() { super::super::c::call() }"),
            ("c.rs", "fn f(x: crate::a::X) {}"),
            ("d.rs", "pub struct Thing;"),
        ]);
        assert_eq!(circle, ["crates/x: these files import each other in a circle: a, b::deep, c"]);
    }

    #[test]
    fn parents_children_tests_and_comments_form_no_circle() {
        let none = findings_of(&[
            ("lib.rs", "use crate::a::X;"),
            ("a/mod.rs", "use self::b::Y;\nuse crate::Root;"),
            ("a/b.rs", "use super::X;\n// crate::c::Z\n#[cfg(test)]\nmod tests {\n    use crate::c::Z;\n}"),
            ("c.rs", "use crate::a::b::Y;"),
        ]);
        assert_eq!(none, Vec::<String>::new());
    }
}
