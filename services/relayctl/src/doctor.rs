//! `relayctl doctor`: checks the installation and proposes fixes.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Result;
use relay_admin::{Finding, Installation, Verdict, examine};
use relay_engine::{
    access::secrets::KeyList,
    settings::{NatsConfig, Switch},
};

use crate::{connection::Database, output::Output};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    nats: NatsConfig,
    /// As for gateways.
    #[arg(long, env = "RELAY_SECRET_KEYS", default_value = "", hide_env_values = true)]
    secret_keys: KeyList,
    /// As for gateways. Only its presence matters here.
    #[arg(long, env = "RELAY_SIGNING_SECRET", hide_env_values = true)]
    signing_secret: Option<String>,
    /// As for gateways. With `on`, missing keys are a finding.
    #[arg(long, env = "RELAY_HOSTED", value_enum, default_value_t = Switch::Off)]
    hosted: Switch,
}

pub(crate) async fn run(arguments: &Arguments, out: Output) -> Result<ExitCode> {
    let installation = Installation {
        database_url: arguments.database.url().to_owned(),
        nats: arguments.nats.servers(),
        secret_keys: arguments.secret_keys.clone(),
        // An empty variable counts as unset, as in gateways and workers.
        has_signing_secret: arguments.signing_secret.as_ref().is_some_and(|secret| !secret.is_empty()),
        hosted: arguments.hosted == Switch::On,
    };
    let findings = examine(&installation).await;
    if out.is_json() {
        println!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        let coloured = std::io::stdout().is_terminal();
        for finding in &findings {
            println!("{}", format_finding(finding, coloured));
        }
    }
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn format_finding(finding: &Finding, coloured: bool) -> String {
    let (word, colour) = match finding.verdict {
        Verdict::Ok => ("ok  ", 32),
        Verdict::Warn => ("warn", 33),
        Verdict::Fail => ("FAIL", 31),
    };
    let word = if coloured { format!("\x1b[{colour}m{word}\x1b[0m") } else { word.to_owned() };
    let fix = finding.fix.map(|fix| format!("\n      -> {fix}")).unwrap_or_default();
    format!("{word}  {:<28} {}{fix}", finding.check, finding.found)
}
