//! Generated documents name their generator, so that a reader does not edit them by hand. JSON has no comments, so
//! `docs/openapi.json` and the dashboards are exempt.

use super::Source;

/// Document and the text that names its generator.
const GENERATED: [(&str, &str); 3] = [
    ("docs/schema.md", "generated from the migrated database by `crates/store/tests/schema/document.rs`"),
    ("helm/relay/README.md", "<!-- values: made by helm/tools/values_table.py -->"),
    ("crates/workspace-hack/Cargo.toml", "# Written by `cargo xtask features`"),
];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for (path, generator) in GENERATED {
        let source = sources.iter().find(|source| source.path == path);
        if !source.is_some_and(|source| source.text.contains(generator)) {
            findings.push(format!("{path}: does not name its generator: \"{generator}\""));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_document_without_its_generator_is_found() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let mut sources: Vec<_> = GENERATED.iter().map(|(path, generator)| source(path, generator)).collect();
        let mut findings = Vec::new();
        check(&sources, &mut findings);
        assert!(findings.is_empty(), "{findings:?}");
        sources[0] = source("docs/schema.md", "# Schema");
        check(&sources, &mut findings);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].starts_with("docs/schema.md: "), "{findings:?}");
    }
}
