//! `cargo xtask attack`: the attacks of one tenant on the others.

use anyhow::Result;

use crate::test;

pub(crate) fn run(mut args: test::Args) -> Result<()> {
    args.runner_args
        .splice(0..0, ["-p".to_owned(), "relay-acceptance".to_owned(), "--test".to_owned(), "attacks".to_owned()]);
    test::run(&args)
}
