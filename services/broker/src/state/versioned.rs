//! Files with a version: a broker reads its own version and lower ones, and refuses those of a newer broker.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::write_private_file;
use crate::unreadable_json::unreadable;

/// Largest state file that is written. Reads rely on it: nothing but brokers writes these files.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Serialize)]
struct Envelope<'a, T> {
    version: u32,
    #[serde(flatten)]
    content: &'a T,
}

#[derive(Debug, Default, Deserialize)]
struct VersionOnly {
    #[serde(default)]
    version: u64,
}

impl VersionOnly {
    fn check(&self, path: &Path, version: u32) -> Result<()> {
        ensure!(
            self.version <= u64::from(version),
            "{} has version {} of its format, and this broker reads up to {version}: start the broker that wrote it, or \
             move the file away",
            path.display(),
            self.version,
        );
        Ok(())
    }
}

/// Refuses content of a newer broker. Content without a version predates versioning.
///
/// # Errors
/// If the content has a version above `version`.
pub(crate) fn refuse_newer(path: &Path, content: &[u8], version: u32) -> Result<()> {
    // Content that is no object is judged by its reader.
    let found: VersionOnly = serde_json::from_slice(content).unwrap_or_default();
    found.check(path, version)
}

/// Reads a file of this version or a lower one. `None` without a file.
///
/// # Errors
/// If it cannot be read, or a newer broker has written it.
pub(crate) fn read_versioned<T: DeserializeOwned>(path: &Path, version: u32) -> Result<Option<T>> {
    let content = match fs::read(path) {
        Ok(content) => content,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    };
    let failed = |error: serde_json::Error| anyhow!("read {}: {}", path.display(), unreadable(&error));
    // The version alone first: the rest of a newer format may have any shape.
    let found: VersionOnly = serde_json::from_slice(&content).map_err(failed)?;
    found.check(path, version)?;
    serde_json::from_slice(&content).map_err(failed).map(Some)
}

/// Replaces a file. Blocks for a write to the disk.
///
/// # Errors
/// If the content is above 16 MiB or the disk does not take it; the old content stays then.
pub(crate) fn write_versioned<T: Serialize>(path: &Path, version: u32, content: &T) -> Result<()> {
    let encoded = serde_json::to_vec(&Envelope { version, content }).context("encode a state file")?;
    ensure!(encoded.len() as u64 <= MAX_BYTES, "{} would be above 16 MiB", path.display());
    write_private_file(path, &encoded).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn lower_versions_are_read_and_higher_ones_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        assert!(read_versioned::<BTreeMap<String, u32>>(&path, 1).expect("no file").is_none());
        write_versioned(&path, 1, &BTreeMap::from([("a", 5)])).expect("a file");
        let read = |version| read_versioned::<BTreeMap<String, u32>>(&path, version);
        assert_eq!(read(2).expect("a file").and_then(|content| content.get("a").copied()), Some(5));
        // A newer format may have any shape.
        fs::write(&path, r#"{"version": 3, "a": "text"}"#).expect("a file");
        let refused = read(2).expect_err("a newer file").to_string();
        assert!(refused.contains("version 3") && refused.contains("up to 2"), "{refused}");
    }
}
