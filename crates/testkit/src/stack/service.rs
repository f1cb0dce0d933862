//! One engine process: a gateway or the worker.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::ports::Port;
use crate::process::{Process, Spec};
use crate::wait;

/// From start to `/ready`. Includes what a gateway waits for on a loaded machine.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// A drain is bounded by 30 s; a little more for the process to end.
const DRAIN_WITHIN: Duration = Duration::from_secs(40);

/// Switches the gateways' request budgets `on` or `off`.
const RATE_LIMITS: &str = "RELAY_RATE_LIMITS";

/// What tenants' URLs may lead to besides public addresses: receivers of tests and demos are on this machine.
const EGRESS_ALLOW: (&str, &str) = ("RELAY_EGRESS_ALLOW", "127.0.0.0/8,::1");

/// The connections an engine process is given.
#[derive(Clone, Debug)]
pub struct Backends {
    /// `DATABASE_URL`.
    pub database_url: String,
    /// `NATS_URL`.
    pub nats_url: String,
}

/// A gateway or worker process, with the addresses it keeps over restarts.
#[derive(Debug)]
pub struct Service {
    process: Process,
    url: String,
    metrics_url: String,
    http: reqwest::Client,
    /// Keeps the addresses reserved while the process is down.
    ports: Vec<Port>,
}

impl Service {
    /// Starts `relay-gateway` listening on `listen`, without waiting for it.
    pub fn gateway(
        name: &str,
        program: PathBuf,
        backends: &Backends,
        listen: &str,
        metrics_listen: &str,
        env: &[(String, String)],
        log: &Path,
    ) -> Result<Self> {
        // Tests, the demo and the load generator ask for more than anybody's budget. `env` may say otherwise.
        let limits = std::env::var(RATE_LIMITS).unwrap_or_else(|_| "off".to_owned());
        let addresses =
            [("RELAY_LISTEN", listen), ("RELAY_METRICS_LISTEN", metrics_listen), (RATE_LIMITS, limits.as_str())];
        let spec = specification(name, program, backends, &addresses, env, log);
        Self::start(spec, listen, metrics_listen)
    }

    /// Starts `relay-worker`, without waiting for it. Its only listener is the metrics one.
    pub fn worker(
        name: &str,
        program: PathBuf,
        backends: &Backends,
        metrics_listen: &str,
        env: &[(String, String)],
        log: &Path,
    ) -> Result<Self> {
        let addresses = [("RELAY_METRICS_LISTEN", metrics_listen)];
        let spec = specification(name, program, backends, &addresses, env, log);
        Self::start(spec, metrics_listen, metrics_listen)
    }

    fn start(spec: Spec, listen: &str, metrics_listen: &str) -> Result<Self> {
        // A fresh connection per probe: a kept one may belong to the process that was killed.
        let http = crate::http::client().pool_max_idle_per_host(0).timeout(Duration::from_secs(5)).build()?;
        Ok(Self {
            process: Process::start(spec)?,
            url: format!("http://{listen}"),
            metrics_url: format!("http://{metrics_listen}/metrics"),
            http,
            ports: Vec::new(),
        })
    }

    /// Holds on to the reservations of its ports.
    #[must_use]
    pub fn keeping(mut self, ports: impl IntoIterator<Item = Port>) -> Self {
        self.ports.extend(ports);
        self
    }

    /// Waits until `/ready` answers 200; fails with the last log lines if the process ends or takes too long.
    pub async fn wait_ready(&self) -> Result<()> {
        let what = format!("{} to be ready", self.name());
        let ready = wait::until_ok(&what, READY_WITHIN, || async {
            if !self.process.is_running() {
                return Ok(false);
            }
            ensure!(self.is_ready().await, "not ready yet");
            Ok::<_, anyhow::Error>(true)
        })
        .await;
        match ready {
            Ok(true) => Ok(()),
            Ok(false) => {
                anyhow::bail!("{} ended while starting:\n{}", self.name(), self.log_tail(25))
            }
            Err(error) => anyhow::bail!("{error:#}; its log ends:\n{}", self.log_tail(25)),
        }
    }

    /// Whether `/ready` answers 200 now.
    pub async fn is_ready(&self) -> bool {
        let answer = self.http.get(format!("{}/ready", self.url)).send().await;
        answer.is_ok_and(|answer| answer.status() == 200)
    }

    /// Its name, which is also its log file's.
    pub fn name(&self) -> &str {
        self.process.name()
    }

    /// `http://host:port` of its main listener (the worker's is its metrics listener).
    pub fn url(&self) -> &str {
        &self.url
    }

    /// `ws://host:port`.
    pub fn ws_url(&self) -> String {
        self.url.replacen("http", "ws", 1)
    }

    /// Full URL of its Prometheus page.
    pub fn metrics_url(&self) -> &str {
        &self.metrics_url
    }

    /// The Prometheus page now.
    pub async fn metrics(&self) -> Result<String> {
        Ok(self.http.get(&self.metrics_url).send().await?.error_for_status()?.text().await?)
    }

    /// The sum of all samples of one metric, over its labels; 0 if there is none.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        Ok(sum_of(&self.metrics().await?, name))
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// `kill -9`; returns once it is gone.
    pub fn kill9(&self) {
        self.process.kill9();
    }

    /// Kills it if it runs, starts it on the same addresses and waits until it is ready.
    pub async fn restart(&self) -> Result<()> {
        self.start_again()?;
        self.wait_ready().await
    }

    /// Kills it if it runs and starts it on the same addresses, without waiting.
    pub fn start_again(&self) -> Result<()> {
        self.process.kill9();
        self.process.start_again()
    }

    /// SIGTERM, and waits for the graceful end.
    pub async fn terminate(&self) -> Result<()> {
        let status = self.process.stop_with(libc::SIGTERM, DRAIN_WITHIN).await?;
        ensure!(status.success(), "{} ended with {status}:\n{}", self.name(), self.log_tail(10));
        Ok(())
    }

    /// Sends SIGTERM without waiting.
    pub fn sigterm(&self) {
        self.process.signal(libc::SIGTERM);
    }

    /// Freezes it.
    pub fn sigstop(&self) {
        self.process.sigstop();
    }

    /// Wakes it.
    pub fn sigcont(&self) {
        self.process.sigcont();
    }

    /// Its log file.
    pub fn log(&self) -> &Path {
        self.process.log()
    }

    /// The last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        self.process.log_tail(lines)
    }
}

fn specification(
    name: &str,
    program: PathBuf,
    backends: &Backends,
    addresses: &[(&str, &str)],
    env: &[(String, String)],
    log: &Path,
) -> Spec {
    let mut spec = Spec::new(name, program, log);
    let own = [("DATABASE_URL", backends.database_url.as_str()), ("NATS_URL", backends.nats_url.as_str())];
    for (key, value) in own.iter().chain(&[EGRESS_ALLOW]).chain(addresses) {
        spec.env.push(((*key).to_owned(), Some((*value).to_owned())));
    }
    for (key, value) in env {
        spec.env.push((key.clone(), Some(value.clone())));
    }
    spec
}

fn sum_of(page: &str, name: &str) -> f64 {
    page.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            rest.starts_with(['{', ' ']).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_not_over_its_namesakes() {
        let page = "# TYPE a counter\na{x=\"1\"} 2\na{x=\"two words\"} 3\na_total 7\nb 1\n";
        assert_eq!(sum_of(page, "a"), 5.0);
        assert_eq!(sum_of(page, "c"), 0.0);
    }
}
