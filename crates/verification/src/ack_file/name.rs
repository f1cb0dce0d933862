//! Names of agents and deliveries as names of folders and files.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Longest name of a file on the file systems in use.
const MAX_FILE_NAME: usize = 255;

const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');

/// Returns the folder name for an agent: its name, percent-encoded except for `[A-Za-z0-9._-]`, so that `../x` stays
/// where it belongs. Different agents have different folders. Most names are folder names as they are; `.` and `..` are
/// encoded.
///
/// The result can be longer than a file system allows, for long names of other alphabets. Then the folder cannot be
/// made, and the file channel cannot be required.
pub fn folder_name(agent: &str) -> String {
    match agent {
        "." => "%2E".to_owned(),
        ".." => "%2E%2E".to_owned(),
        name => utf8_percent_encode(name, ENCODED).to_string(),
    }
}

/// Returns `true` if a delivery id can name a file: no separators, no controls, no leading dot (temporary files have
/// one), and 1 to 255 bytes.
pub fn is_plain_file_name(id: &str) -> bool {
    (1..=MAX_FILE_NAME).contains(&id.len())
        && !id.starts_with('.')
        && !id.contains(|character: char| matches!(character, '/' | '\\') || character.is_control())
}
