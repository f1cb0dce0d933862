//! Files: what their names and types may look like, and how a name is offered to a browser.

use std::fmt::Write as _;

use crate::names::{InvalidText, MAX_CONTENT_TYPE_BYTES, TextProblem, check_length, check_name};

/// A file's name, in bytes.
pub const MAX_FILENAME_BYTES: usize = 255;
/// Files attached to one message.
pub const MAX_ATTACHMENTS: usize = 20;

/// A file's name: one line of any characters. It is shown and offered for a download, and never becomes
/// part of a path.
///
/// # Errors
/// When it is blank, too long or has control characters.
pub fn check_filename(name: &str) -> Result<(), InvalidText> {
    check_name("filename", name, MAX_FILENAME_BYTES)
}

/// A content type: `type/subtype`, with parameters or without.
///
/// # Errors
/// When it is no content type, or too long.
pub fn check_content_type(text: &str) -> Result<(), InvalidText> {
    check_length("content_type", text, MAX_CONTENT_TYPE_BYTES)?;
    let malformed = InvalidText { field: "content_type", problem: TextProblem::Malformed };
    let is_token = |part: &str| !part.is_empty() && part.bytes().all(is_token_byte);
    let (kind, subtype) = essence(text).split_once('/').ok_or(malformed.clone())?;
    let printable = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if is_token(kind) && is_token(subtype) && printable { Ok(()) } else { Err(malformed) }
}

/// A character that may be part of a header's name or of a content type (RFC 9110, `tchar`).
#[must_use]
pub const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~'
        )
}

/// `type/subtype` without parameters.
fn essence(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

/// Which content types are taken. A pattern is a whole type (`image/png`), all of a kind (`image/*`) or
/// everything (`*`).
#[derive(Debug, Clone, Default)]
pub struct TypeRules {
    /// Only these; everything when empty.
    pub allowed: Vec<String>,
    /// None of these, even if allowed.
    pub denied: Vec<String>,
}

impl TypeRules {
    /// Whether files of this type are taken.
    #[must_use]
    pub fn take(&self, content_type: &str) -> bool {
        let essence = essence(content_type).to_ascii_lowercase();
        let among = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, &essence));
        (self.allowed.is_empty() || among(&self.allowed)) && !among(&self.denied)
    }
}

fn matches(pattern: &str, essence: &str) -> bool {
    let pattern = pattern.to_ascii_lowercase();
    match pattern.strip_suffix("/*") {
        Some(kind) => essence.split('/').next() == Some(kind),
        None => pattern == "*" || pattern == "*/*" || pattern == essence,
    }
}

/// The `Content-Disposition` with which a file is handed out: to be saved, not shown, under a name without
/// any path (RFC 6266). Old clients read the plain name, others the encoded one.
#[must_use]
pub fn content_disposition(filename: &str) -> String {
    let base = filename.rsplit(['/', '\\']).next().unwrap_or_default();
    let base = base.trim().trim_start_matches('.');
    let base = if base.is_empty() { "file" } else { base };
    let plain: String =
        base.chars().map(|c| if c.is_ascii_alphanumeric() || " .-_()".contains(c) { c } else { '_' }).collect();
    let mut encoded = String::new();
    for byte in base.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn content_types_have_a_kind_and_a_subtype() {
        for text in ["text/plain", "image/svg+xml", "text/plain; charset=utf-8", "application/vnd.x-y.z"] {
            assert_eq!(check_content_type(text), Ok(()), "{text}");
        }
        for text in ["", "text", "/", "text/", "/plain", "te xt/plain", "text/plain\r\nx: y", "text/plä", "a/b/c"] {
            assert!(check_content_type(text).is_err(), "{text:?}");
        }
        assert!(check_content_type(&format!("text/{}", "x".repeat(200))).is_err());
    }

    #[test]
    fn types_are_taken_by_rule() {
        let rules = |allowed: &[&str], denied: &[&str]| TypeRules {
            allowed: allowed.iter().map(ToString::to_string).collect(),
            denied: denied.iter().map(ToString::to_string).collect(),
        };
        for (allowed, denied, content_type, expected) in [
            (&[][..], &[][..], "text/html", true),
            (&[], &["text/html"], "TEXT/HTML; charset=utf-8", false),
            (&["image/*", "text/plain"], &[], "image/png", true),
            (&["image/*", "text/plain"], &[], "text/html", false),
            (&["image/*"], &["image/svg+xml"], "image/svg+xml", false),
            (&["*"], &["application/*"], "text/plain", true),
            (&["*/*"], &["application/*"], "application/zip", false),
        ] {
            assert_eq!(rules(allowed, denied).take(content_type), expected, "{allowed:?} {denied:?} {content_type}");
        }
    }

    #[test]
    fn a_download_has_a_name_without_a_path() {
        for (filename, expected) in [
            ("report.pdf", "attachment; filename=\"report.pdf\"; filename*=UTF-8''report.pdf"),
            ("../../etc/passwd", "attachment; filename=\"passwd\"; filename*=UTF-8''passwd"),
            ("C:\\x\\a b.txt", "attachment; filename=\"a b.txt\"; filename*=UTF-8''a%20b.txt"),
            ("a\"; x=\"b", "attachment; filename=\"a__ x__b\"; filename*=UTF-8''a%22%3B%20x%3D%22b"),
            ("résumé", "attachment; filename=\"r_sum_\"; filename*=UTF-8''r%C3%A9sum%C3%A9"),
            (".bashrc", "attachment; filename=\"bashrc\"; filename*=UTF-8''bashrc"),
            ("/", "attachment; filename=\"file\"; filename*=UTF-8''file"),
        ] {
            assert_eq!(content_disposition(filename), expected, "{filename}");
        }
    }

    proptest! {
        #[test]
        fn any_name_makes_a_header(filename in any::<String>()) {
            let header = content_disposition(&filename);
            prop_assert!(header.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{header}");
            prop_assert_eq!(header.matches('"').count(), 2);
            prop_assert!(!header.contains(['/', '\\']));
        }
    }
}
