//! `cargo xtask chaos`: the crash tests at full length.

use anyhow::Result;

use crate::test;

pub(crate) fn run(mut args: test::Args) -> Result<()> {
    args.runner_args.splice(0..0, ["-p".to_owned(), "relay-acceptance".to_owned()]);
    args.profile = Some("chaos");
    args.env.push(("RELAY_CHAOS", "full".to_owned()));
    test::run(&args)
}
