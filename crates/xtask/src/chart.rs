//! `cargo xtask chart`: the Helm chart, the alerts and the dashboards against Helm, Kubernetes' schemas, promtool and
//! Grafana's model.

use anyhow::{Context, Result, ensure};

use crate::python::Packages;

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Regenerates the snapshots, the dashboards and the table of values; read the difference before you commit it.
    #[arg(long)]
    update: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    check(&Packages::installed()?, args)
}

/// The same with packages that are installed already.
pub(crate) fn check(packages: &Packages, args: &Args) -> Result<()> {
    let run = |arguments: &[&str]| {
        let mut python = packages.python(arguments);
        if args.update {
            python.env("RELAY_UPDATE_SNAPSHOTS", "1");
        }
        let status = python.status().context("run python3")?;
        ensure!(status.success(), "python3 {} ended with {status}", arguments.join(" "));
        Ok(())
    };
    if args.update {
        run(&["helm/tools/values_table.py"])?;
        run(&["helm/tools/dashboards.py"])?;
    }
    run(&["-m", "pytest", "-q", "-p", "no:cacheprovider", "helm/tests"])
}
