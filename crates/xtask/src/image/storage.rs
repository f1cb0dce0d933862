//! Storage of the images and containers of one run: folders of their own, which are removed with it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

/// Threads that a container may have: plenty for one program, and below what users commonly may.
const PROCESSES: u64 = 16_384;

/// Separate from the machine's own images and containers. Removed when dropped.
pub(crate) struct Storage {
    dir: PathBuf,
    made: AtomicU32,
}

impl Storage {
    /// An empty one, below the system's folder for temporary files: sockets in it must have short paths.
    pub(crate) fn new() -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("relay-img-{}", std::process::id()));
        std::fs::create_dir(&dir).with_context(|| format!("make {}", dir.display()))?;
        let storage = Self { dir, made: AtomicU32::new(0) };
        // Runtimes set limits that may lie above the ones of this process, and are refused then.
        let (files, processes) = (limit("Max open files")?, limit("Max processes")?.min(PROCESSES));
        let limits = format!("[\"nofile={files}:{files}\", \"nproc={processes}:{processes}\"]");
        std::fs::write(
            storage.settings(),
            format!(
                "[containers]\nnetns = \"host\"\ndefault_ulimits = {limits}\n[engine]\ncgroup_manager = \"cgroupfs\"\n"
            ),
        )?;
        Ok(storage)
    }

    /// A path in it that does not exist yet.
    pub(crate) fn fresh_dir(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}-{}", self.made.fetch_add(1, Ordering::Relaxed)))
    }

    pub(crate) fn buildah(&self) -> Command {
        self.command("buildah")
    }

    pub(crate) fn podman(&self) -> Command {
        let mut podman = self.command("podman");
        // The one that was seen to run without any cgroup set up for it.
        if Command::new("runc").arg("--version").output().is_ok() {
            podman.args(["--runtime", "runc"]);
        }
        podman
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["--storage-driver", "vfs", "--root"]).arg(self.dir.join("storage"));
        command.arg("--runroot").arg(self.dir.join("run"));
        command.env("CONTAINERS_CONF", self.settings()).stdin(Stdio::null());
        command
    }

    fn settings(&self) -> PathBuf {
        self.dir.join("containers.conf")
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // Containers first: they run on files in the folder. If one stays, the removal of the folder reports it.
        let _ = self.podman().args(["pod", "rm", "--force", "--all", "--time", "1"]).output();
        let _ = self.podman().args(["rm", "--force", "--all", "--time", "1"]).output();
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("{} could not be removed: {error}", self.dir.display());
        }
    }
}

/// The hard limit of this process, as the kernel tells it; the largest number where there is none.
fn limit(name: &str) -> Result<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").context("read the limits of this process")?;
    let line = limits.lines().find(|line| line.starts_with(name)).with_context(|| format!("no limit {name:?}"))?;
    let hard = line[name.len()..].split_whitespace().nth(1).unwrap_or_default();
    if hard == "unlimited" { Ok(1 << 20) } else { hard.parse().with_context(|| format!("read {line:?}")) }
}

/// Runs a command and returns what it printed; its failure is an error with what it complained of.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("run {name}: is it installed?"))?;
    if !output.status.success() {
        bail!("{name} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
