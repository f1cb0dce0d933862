//! Rules of the tags of nodes: some are set by enrolments only, some are refused.

use crate::names::{InvalidText, TextProblem};

/// Prefix of tags about the cloud that runs a node. Only an enrolment sets them, so that placement may rely on them.
const CLOUD_PREFIX: &str = "cloud:";
/// Prefix of tags that name a repository.
pub const REPO_PREFIX: &str = "repo:";

/// Returns whether a node may declare a tag itself, in a frame.
#[must_use]
pub fn is_declarable(tag: &str) -> bool {
    !tag.starts_with(CLOUD_PREFIX)
}

/// Checks a tag. Repositories are named `owner/name`: an absolute path has a meaning on one machine only.
///
/// # Errors
/// If the tag names a repository by an absolute path.
pub fn check_repo_tag(tag: &str) -> Result<(), InvalidText> {
    match tag.strip_prefix(REPO_PREFIX) {
        Some(repo) if is_absolute_path(repo) => Err(InvalidText { field: "tags", problem: TextProblem::AbsolutePath }),
        Some(_) | None => Ok(()),
    }
}

/// Returns whether a text is an absolute path on Unix or Windows, or one in a home folder.
fn is_absolute_path(text: &str) -> bool {
    let text = text.trim_start();
    match text.as_bytes() {
        [b'/' | b'\\' | b'~', ..] => true,
        [drive, b':', b'/' | b'\\', ..] => drive.is_ascii_alphabetic(),
        // `get`: the fifth byte may lie within a character, at which an index would panic.
        _ => text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("file:")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_not_named_by_absolute_paths() {
        for tag in ["repo:acme/site", "repo:acme", "repo:", "gpu", "/srv", "path:/srv", "repo:a:/b/c"] {
            let accepted = check_repo_tag(tag).is_ok();
            assert_eq!(accepted, tag != "repo:a:/b/c", "{tag}");
        }
        for tag in ["repo:/srv/site", "repo:~/site", r"repo:C:\site", r"repo:\\host\site", "repo:file:///site"] {
            assert!(check_repo_tag(tag).is_err(), "{tag}");
        }
    }

    #[test]
    fn nodes_do_not_declare_their_cloud() {
        assert!(is_declarable("gpu") && is_declarable("repo:acme/site"));
        assert!(!is_declarable("cloud:eu-west"));
    }
}
