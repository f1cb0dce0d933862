//! Files: the [`File`] itself, its lifecycle ([`FileStatus`]), rules for names and content types
//! ([`ContentTypeRules`]), and the `Content-Disposition` of downloads.

use std::fmt::Write as _;

use chrono::{DateTime, Utc};

use crate::{
    AgentId, FileId, FileObjectId,
    names::{InvalidText, MAX_CONTENT_TYPE_BYTES, TextProblem, check_length, check_name},
};

/// Maximum length of a file name, in bytes.
pub const MAX_FILENAME_BYTES: usize = 255;
/// Maximum number of files attached to one message.
pub const MAX_ATTACHMENTS: usize = 20;

/// Stage of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum FileStatus {
    /// Declared; its content may be uploaded and replaced.
    Pending,
    /// Uploaded and immutable.
    Complete,
    /// Deleted by its owner, or expired before it was complete.
    Deleted,
}

crate::columns::stored_name!(FileStatus);

/// Checks a file name: one line of any characters. The name appears in answers and downloads, never in a storage path.
///
/// # Errors
/// If it is blank, too long or contains control characters.
pub fn check_filename(name: &str) -> Result<(), InvalidText> {
    check_name("filename", name, MAX_FILENAME_BYTES)
}

/// Checks a content type: `type/subtype`, with or without parameters.
///
/// # Errors
/// If it is malformed or too long.
pub fn check_content_type(text: &str) -> Result<(), InvalidText> {
    check_length("content_type", text, MAX_CONTENT_TYPE_BYTES)?;
    let malformed = InvalidText { field: "content_type", problem: TextProblem::Malformed };
    let is_token = |part: &str| !part.is_empty() && part.bytes().all(is_token_byte);
    let (kind, subtype) = essence(text).split_once('/').ok_or(malformed.clone())?;
    // The text becomes a header of downloads, which a control character would break.
    let printable = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if is_token(kind) && is_token(subtype) && printable { Ok(()) } else { Err(malformed) }
}

/// Returns whether a byte may be part of a header name or a content type (RFC 9110, `tchar`).
#[must_use]
pub const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~'
        )
}

/// Returns `type/subtype` without parameters.
fn essence(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

/// Allowed and denied content types. A pattern is a whole type (`image/png`), a family (`image/*`) or everything (`*`).
#[derive(Debug, Clone, Default)]
pub struct ContentTypeRules {
    /// Allowed patterns; everything is allowed when empty.
    pub allowed: Vec<String>,
    /// Denied patterns, which take precedence.
    pub denied: Vec<String>,
}

impl ContentTypeRules {
    /// Returns whether files of this type are accepted.
    #[must_use]
    pub fn allows(&self, content_type: &str) -> bool {
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

/// Returns the `Content-Disposition` of a download: an attachment whose name has no path (RFC 6266). Old clients read
/// the plain name, others the encoded one.
#[must_use]
pub fn content_disposition(filename: &str) -> String {
    let base = filename.rsplit(['/', '\\']).next().unwrap_or_default();
    // A leading dot would save the download as a hidden file.
    let base = base.trim().trim_start_matches('.');
    let base = if base.is_empty() { "file" } else { base };
    // A quote would end the quoted name, a backslash would escape its end, and a line end would end the header.
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

/// File with its owner.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct File {
    pub file_id: FileId,
    pub filename: String,
    /// Media type as declared by the owner.
    pub content_type: String,
    /// Declared size; an upload has exactly this size.
    pub size_bytes: i64,
    pub agent_id: AgentId,
    pub uploaded_by: String,
    pub status: FileStatus,
    /// The object with its content, once uploaded.
    pub object_id: Option<FileObjectId>,
    pub created_at: DateTime<Utc>,
    /// A file that is not complete by then is deleted.
    pub expires_at: DateTime<Utc>,
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
    fn types_are_accepted_by_rule() {
        let rules = |allowed: &[&str], denied: &[&str]| ContentTypeRules {
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
            assert_eq!(rules(allowed, denied).allows(content_type), expected, "{allowed:?} {denied:?} {content_type}");
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
        fn any_name_yields_a_valid_header(filename in any::<String>()) {
            let header = content_disposition(&filename);
            prop_assert!(header.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{header}");
            prop_assert_eq!(header.matches('"').count(), 2);
            prop_assert!(!header.contains(['/', '\\']));
        }
    }
}
