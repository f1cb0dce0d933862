//! Stack under load.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use relay_testkit::stack::Stack;

use crate::cli::Common;
use crate::usage::Roots;

/// Running stack, stopped when dropped.
pub(crate) struct Target {
    stack: Stack,
    has_worker: bool,
}

impl Target {
    /// Starts a stack with `gateways` gateways and a worker; with none, only the bare servers.
    pub(crate) async fn start(common: &Common, gateways: usize) -> Result<Self> {
        let has_worker = gateways > 0;
        let mut builder = Stack::builder().gateways(gateways).worker(has_worker);
        for (key, value) in &common.env {
            builder = builder.env(key, value);
        }
        if let Some(dir) = &common.state_dir {
            builder = builder.state_dir(dir);
        }
        Ok(Self { stack: builder.start().await.context("start the stack")?, has_worker })
    }

    pub(crate) fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Returns the URLs of the gateways.
    pub(crate) fn urls(&self) -> Vec<String> {
        self.stack.gateways().iter().map(|gateway| gateway.url().to_owned()).collect()
    }

    /// Returns the running processes of the stack.
    pub(crate) fn roots(&self) -> Roots {
        let mut roots = BTreeMap::new();
        for gateway in self.stack.gateways().iter().filter(|gateway| gateway.is_running()) {
            roots.insert(gateway.name().to_owned(), gateway.pid());
        }
        if self.has_worker {
            roots.insert("worker".to_owned(), self.stack.worker().pid());
        }
        roots.insert("nats".to_owned(), self.stack.nats().pid());
        roots.insert("postgres".to_owned(), self.stack.postgres().pid());
        roots
    }
}
