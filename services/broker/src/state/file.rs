//! Private files that are replaced in one step.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

/// Creates a directory and its parents for the owner only; an existing one is restricted.
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

/// Replaces a file for the owner only. A crash leaves the old content or the new one.
pub(crate) fn write_private_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // In the same folder, where a rename is one step. The name is fixed, so that the next write replaces a remnant of a
    // crash; two writers of one file must therefore exclude each other.
    let temporary = folder.join(format!(".{name}.tmp"));
    let mut options = OpenOptions::new();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    // Before the rename: otherwise a crash of the machine may leave the new name with an empty file.
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    // The rename itself is on the disk only with the folder.
    File::open(folder)?.sync_all()
}
