//! `relayctl completions`: shell completions.

use clap::CommandFactory as _;
use clap_complete::{Shell, generate};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Shell. For bash: `relayctl completions bash > /etc/bash_completion.d/relayctl`.
    shell: Shell,
}

pub(crate) fn run(arguments: &Arguments) {
    let mut command = crate::Arguments::command();
    generate(arguments.shell, &mut command, "relayctl", &mut std::io::stdout());
}
