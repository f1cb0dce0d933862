//! A folder with more files than this is split by noun.

use std::collections::BTreeMap;

use super::Source;

/// About the fullest folder that a reader takes in at a glance.
const MAX_FILES: usize = 24;

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *folders.entry(folder).or_default() += 1;
    }
    for (folder, files) in folders.into_iter().filter(|(_, files)| *files > MAX_FILES) {
        findings.push(format!("{folder}: {files} Rust files; past {MAX_FILES}, split the folder by noun"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_full_with_24_files() {
        let files = |count| {
            (0..count).map(|n| Source { path: format!("a/src/{n}.rs"), text: String::new() }).collect::<Vec<_>>()
        };
        let mut findings = Vec::new();
        check(&files(24), &mut findings);
        assert!(findings.is_empty());
        check(&files(25), &mut findings);
        assert_eq!(findings.len(), 1);
    }
}
