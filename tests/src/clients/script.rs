//! Runs client scripts: shows their output, answers their requests, and checks their exit status.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::install;

/// Time limit of a script on a loaded machine.
const LIMIT: Duration = Duration::from_secs(150);
/// Time limit of the fuzzer, which calls every operation many times.
const FUZZING_LIMIT: Duration = Duration::from_secs(540);

/// Request of a script to the test: a line that begins with `@`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request(pub String);

/// Script with its environment and arguments.
#[derive(Debug)]
pub struct Script {
    name: String,
    command: Command,
    limit: Duration,
}

impl Script {
    /// Creates a Node script with the npm packages.
    pub async fn node(name: &str) -> Result<Self> {
        let dir = install::npm_packages().await?;
        Ok(Self::new(name, "node", &[dir.join(name)]))
    }

    /// Creates a Python script with the packages from PyPI.
    pub async fn python(name: &str) -> Result<Self> {
        let dir = install::python_packages().await?;
        let mut script = Self::new(name, "python3", &[install::sources().join(name)]);
        script.command.env("PYTHONPATH", dir).env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(script)
    }

    /// Creates a run of schemathesis, the fuzzer for OpenAPI documents.
    pub async fn schemathesis(name: &str) -> Result<Self> {
        let dir = install::schemathesis().await?;
        let mut script = Self::new(name, "python3", &[]);
        script.command.args(["-m", "schemathesis.cli"]);
        let path = std::env::join_paths([dir.as_path(), install::sources()])?;
        script.command.env("PYTHONPATH", path).env("SCHEMATHESIS_HOOKS", "openapi_hooks");
        script.command.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
        script.limit = FUZZING_LIMIT;
        Ok(script)
    }

    fn new(name: &str, program: &str, args: &[PathBuf]) -> Self {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        // The engine is on the loopback interface, so proxies for registries must not apply.
        for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(proxy);
        }
        Self { name: name.to_owned(), command, limit: LIMIT }
    }

    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<Path>) -> Self {
        self.command.env(key, value.as_ref());
        self
    }

    #[must_use]
    pub fn args<'a>(mut self, args: impl IntoIterator<Item = &'a str>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn timeout(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// Runs the script to its end. `answer` handles each request while the script waits.
    ///
    /// # Errors
    /// If the script fails, takes too long, or `answer` fails.
    #[expect(clippy::print_stdout, reason = "shown with a failed test")]
    pub async fn run(mut self, answer: impl AsyncFn(Request) -> Result<()>) -> Result<()> {
        let mut child = self.command.spawn().with_context(|| format!("start {}", self.name))?;
        let mut answers = child.stdin.take().context("the script's stdin")?;
        let mut lines = BufReader::new(child.stdout.take().context("the script's stdout")?).lines();
        let all = async {
            while let Some(line) = lines.next_line().await? {
                println!("{}: {line}", self.name);
                if let Some(request) = line.strip_prefix('@') {
                    answer(Request(request.to_owned())).await?;
                    answers.write_all(b"done\n").await?;
                }
            }
            Ok::<_, anyhow::Error>(child.wait().await?)
        };
        let limit = self.limit;
        let Ok(status) = timeout(limit, all).await else { bail!("{} did not end in {limit:?}", self.name) };
        let status = status?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}
