//! [`FakeAgent`]: a program that notes its messages in a file.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::binaries;

/// Fake agent that notes its messages in a file.
#[derive(Debug, Clone)]
pub struct FakeAgent {
    log: PathBuf,
    args: Vec<String>,
}

impl FakeAgent {
    /// Describes an agent that shows messages in one way (`cooked`, `raw`, `screen` or `mute`).
    pub fn new(show: &str, log: PathBuf, more: &[&str]) -> Self {
        let path = log.display().to_string();
        let args = [show, "--log", &path].into_iter().chain(more.iter().copied()).map(str::to_owned).collect();
        Self { log, args }
    }

    /// Returns the path of the program.
    pub fn program(&self) -> Result<String> {
        Ok(binaries::find(&binaries::directory()?, "fake-agent")?.display().to_string())
    }

    /// Returns the program's arguments.
    pub fn args(&self) -> &[String] {
        &self.args
    }

    /// Returns the submitted messages, each with the process that received it.
    pub fn messages(&self) -> Vec<(u32, String)> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let parse = |line: &str| {
            let (pid, text) = line.split_once(' ')?;
            Some((pid.parse().ok()?, text.to_owned()))
        };
        text.lines().filter_map(parse).collect()
    }

    /// Returns the words after the last colon of each message: the bodies, if they have no colon.
    pub fn bodies(&self) -> Vec<String> {
        let body = |(_, text): (u32, String)| text.rsplit_once("]: ").map(|(_, body)| body.to_owned());
        self.messages().into_iter().filter_map(body).collect()
    }
}
