//! Engine process: a gateway or a worker.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::ports::Port;
use crate::process::{Process, Spec, impl_process_controls};

/// Time from start to `/ready` on a loaded machine.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Maximum time of a drain (30 s) and of the exit.
const DRAIN_WITHIN: Duration = Duration::from_secs(40);

/// Switches the gateways' rate limits `on` or `off`.
const RATE_LIMITS: &str = "RELAY_RATE_LIMITS";

/// Allowed destinations of tenants' URLs besides public addresses: endpoints of tests and demos are on this machine.
const EGRESS_ALLOW: (&str, &str) = ("RELAY_EGRESS_ALLOW", "127.0.0.0/8,::1");

/// Backends of an engine process.
#[derive(Clone, Debug)]
pub struct Backends {
    /// Value of `DATABASE_URL`.
    pub database_url: String,
    /// Value of `NATS_URL`.
    pub nats_url: String,
}

/// Program and environment of a gateway or worker.
#[derive(Clone, Debug)]
pub struct ServiceSpec<'a> {
    /// Name in messages.
    pub name: &'a str,
    /// Path of the program.
    pub program: PathBuf,
    /// Servers to connect to.
    pub backends: &'a Backends,
    /// Variables in addition to the environment of this process.
    pub env: &'a [(String, String)],
    /// File that the output is appended to.
    pub log: PathBuf,
}

/// Gateway or worker process with addresses that stay the same over restarts.
#[derive(Debug)]
pub struct Service {
    process: Process,
    url: String,
    metrics_url: String,
    http: reqwest::Client,
    /// Reserves the addresses while the process is down.
    ports: Vec<Port>,
}

impl Service {
    /// Starts `relay-gateway` listening on `listen`, without waiting for it.
    pub fn gateway(spec: &ServiceSpec<'_>, listen: &str, metrics_listen: &str) -> Result<Self> {
        // Tests, the demo and the load generator exceed any plan's rate limits. `env` can override it.
        let limits = std::env::var(RATE_LIMITS).unwrap_or_else(|_| "off".to_owned());
        let addresses =
            [("RELAY_LISTEN", listen), ("RELAY_METRICS_LISTEN", metrics_listen), (RATE_LIMITS, limits.as_str())];
        Self::start(spec.process(&addresses), listen, metrics_listen)
    }

    /// Starts `relay-worker`, without waiting for it. Its only listener is the metrics one.
    pub fn worker(spec: &ServiceSpec<'_>, metrics_listen: &str) -> Result<Self> {
        let addresses = [("RELAY_METRICS_LISTEN", metrics_listen)];
        Self::start(spec.process(&addresses), metrics_listen, metrics_listen)
    }

    fn start(spec: Spec, listen: &str, metrics_listen: &str) -> Result<Self> {
        // A new connection per probe, because a pooled one may belong to a killed process.
        let http = crate::http::client().pool_max_idle_per_host(0).timeout(Duration::from_secs(5)).build()?;
        Ok(Self {
            process: Process::start(spec)?,
            url: format!("http://{listen}"),
            metrics_url: format!("http://{metrics_listen}/metrics"),
            http,
            ports: Vec::new(),
        })
    }

    /// Keeps the reservations of its ports while it lives.
    #[must_use]
    pub fn with_reserved_ports(mut self, ports: impl IntoIterator<Item = Port>) -> Self {
        self.ports.extend(ports);
        self
    }

    /// Waits until `/ready` answers 200; fails with the last log lines if the process ends or takes too long.
    pub async fn wait_ready(&self) -> Result<()> {
        let probe = || async {
            ensure!(self.is_ready().await, "not ready yet");
            Ok(())
        };
        self.process.wait_until_ready(READY_WITHIN, probe).await
    }

    /// Returns whether `/ready` answers 200.
    pub async fn is_ready(&self) -> bool {
        let answer = self.http.get(format!("{}/ready", self.url)).send().await;
        answer.is_ok_and(|answer| answer.status() == 200)
    }

    /// Returns the name, which is also that of the log file.
    pub fn name(&self) -> &str {
        self.process.name()
    }

    /// Returns `http://host:port` of the main listener (for a worker, the metrics listener).
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the WebSocket base URL.
    pub fn ws_url(&self) -> String {
        self.url.replacen("http", "ws", 1)
    }

    /// Returns the URL of its Prometheus page.
    pub fn metrics_url(&self) -> &str {
        &self.metrics_url
    }

    /// Returns its Prometheus page.
    pub async fn metrics(&self) -> Result<String> {
        Ok(self.http.get(&self.metrics_url).send().await?.error_for_status()?.text().await?)
    }

    /// Returns the sum of all samples of one metric over its labels; 0 without samples.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        Ok(sum_samples(&self.metrics().await?, name))
    }

    /// Restarts the process on the same addresses and waits until it is ready.
    pub async fn restart(&self) -> Result<()> {
        self.start_again()?;
        self.wait_ready().await
    }

    /// Restarts the process on the same addresses without waiting.
    pub fn start_again(&self) -> Result<()> {
        self.process.kill9();
        self.process.start_again()
    }

    /// Sends SIGTERM and waits for the exit.
    pub async fn terminate(&self) -> Result<()> {
        let status = self.process.stop_with(libc::SIGTERM, DRAIN_WITHIN).await?;
        ensure!(status.success(), "{} ended with {status}:\n{}", self.name(), self.log_tail(10));
        Ok(())
    }

    /// Sends SIGTERM without waiting.
    pub fn sigterm(&self) {
        self.process.signal(libc::SIGTERM);
    }

    /// Returns the path of its log.
    pub fn log(&self) -> &Path {
        self.process.log()
    }

    /// Returns the last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        self.process.log_tail(lines)
    }
}

impl_process_controls!(Service);

impl ServiceSpec<'_> {
    fn process(&self, addresses: &[(&str, &str)]) -> Spec {
        let mut spec = Spec::new(self.name, &self.program, &self.log);
        let urls =
            [("DATABASE_URL", self.backends.database_url.as_str()), ("NATS_URL", self.backends.nats_url.as_str())];
        for (key, value) in urls.iter().chain(&[EGRESS_ALLOW]).chain(addresses) {
            spec.env.push(((*key).to_owned(), Some((*value).to_owned())));
        }
        // Last, so that callers can override everything above.
        for (key, value) in self.env {
            spec.env.push((key.clone(), Some(value.clone())));
        }
        spec
    }
}

fn sum_samples(page: &str, name: &str) -> f64 {
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
    fn a_metric_is_summed_over_its_labels_only() {
        let page = "# TYPE a counter\na{x=\"1\"} 2\na{x=\"two words\"} 3\na_total 7\nb 1\n";
        assert_eq!(sum_samples(page, "a"), 5.0);
        assert_eq!(sum_samples(page, "c"), 0.0);
    }
}
