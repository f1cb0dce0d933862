//! The stack under load.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use relay_testkit::stack::Stack;

use crate::cli::Common;
use crate::usage::Roots;

/// A running stack; everything ends when it is dropped.
pub(crate) struct Target {
    stack: Stack,
    has_worker: bool,
}

impl Target {
    /// Starts one with `gateways` gateways and a worker; with none it is the bare servers.
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

    /// The stack itself.
    pub(crate) fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Where the gateways listen.
    pub(crate) fn urls(&self) -> Vec<String> {
        self.stack.gateways().iter().map(|gateway| gateway.url().to_owned()).collect()
    }

    /// Every process of the stack that runs now.
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
