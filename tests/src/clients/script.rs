//! Runs a client's script: its output is shown, its requests are answered, its exit status decides.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::install;

/// Far more than a script takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(150);
/// The same for the fuzzer, which tries every operation many times.
const FUZZING_LIMIT: Duration = Duration::from_secs(540);

/// What a script asks of the test: a line that begins with `@`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request(pub String);

/// A script and what it is given.
#[derive(Debug)]
pub struct Script {
    name: String,
    command: Command,
    limit: Duration,
}

impl Script {
    /// A script for Node, with the npm packages.
    pub async fn node(name: &str) -> Result<Self> {
        let dir = install::npm_packages().await?;
        Ok(Self::new(name, "node", &[dir.join(name)]))
    }

    /// A script for Python, with the packages from PyPI.
    pub async fn python(name: &str) -> Result<Self> {
        let dir = install::python_packages().await?;
        let mut script = Self::new(name, "python3", &[install::sources().join(name)]);
        script.command.env("PYTHONPATH", dir).env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(script)
    }

    /// Schemathesis, the fuzzer for OpenAPI documents, with the packages from PyPI.
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
        // The engine is on the loopback interface, whatever the registries need.
        for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(proxy);
        }
        Self { name: name.to_owned(), command, limit: LIMIT }
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<Path>) -> Self {
        self.command.env(key, value.as_ref());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<'a>(mut self, args: impl IntoIterator<Item = &'a str>) -> Self {
        self.command.args(args);
        self
    }

    /// Runs it in this folder.
    #[must_use]
    pub fn within(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// Runs it to its end. `answer` is called for each request; the script waits for it.
    ///
    /// # Errors
    /// When the script fails, takes too long, or `answer` fails.
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
