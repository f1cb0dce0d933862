//! Identity of this machine, from which the id of the node follows.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::state::{create_private_directory, write_private_file};

const FOLDER: &str = "agent-relay";
const FILE: &str = "machine-id";

/// Reads the seed of this machine, and creates it on first use. Blocks.
///
/// # Errors
/// If there is no data directory, or the file cannot be read or written.
pub(crate) fn machine_seed(data_home: Option<&str>, home: Option<&str>) -> Result<String> {
    let data = data_home.map(PathBuf::from).or_else(|| home.map(|home| Path::new(home).join(".local/share")));
    let folder = data.context("neither XDG_DATA_HOME nor HOME is set")?.join(FOLDER);
    let path = folder.join(FILE);
    match fs::read_to_string(&path) {
        Ok(seed) if !seed.trim().is_empty() => return Ok(seed.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    }
    let seed = uuid::Uuid::new_v4().simple().to_string();
    create_private_directory(&folder).with_context(|| format!("create {}", folder.display()))?;
    write_private_file(&path, seed.as_bytes()).with_context(|| format!("write {}", path.display()))?;
    Ok(seed)
}

/// Id of the node for a working directory and a workspace on this machine.
pub(crate) fn node_id(seed: &str, working_directory: &Path, workspace_id: &str) -> String {
    let mut hash = Sha256::new();
    for part in [seed.as_bytes(), working_directory.as_os_str().as_encoded_bytes(), workspace_id.as_bytes()] {
        // With their lengths, so that other parts with the same bytes in a row give another id.
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    format!("node_{}", &hex::encode(hash.finalize())[..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_created_once_and_the_id_depends_on_all_parts() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().to_str();
        let seed = machine_seed(None, path).expect("a seed");
        assert_eq!(machine_seed(None, path).expect("the same"), seed);
        let id = node_id(&seed, Path::new("/a"), "1");
        assert!(id.starts_with("node_") && id.len() == 37);
        assert_ne!(id, node_id(&seed, Path::new("/a"), "2"));
        assert_ne!(id, node_id(&seed, Path::new("/b"), "1"));
    }
}
