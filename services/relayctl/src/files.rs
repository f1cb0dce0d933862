//! Settings from files: one whose variable `NAME` is unset is read from the file that `NAME_FILE` names, as gateways and workers do.

use anyhow::{Result, anyhow};
use clap::{Arg, Command, CommandFactory as _, FromArgMatches as _, builder::OsStr, builder::Resettable};

use crate::Arguments;

/// Commands that take no setting of this program: what is wrong with one is not theirs to say.
const WITHOUT_SETTINGS: [&str; 2] = ["config", "completions"];

/// Where settings come from besides flags.
struct Around<'a> {
    /// The value of a variable; an empty one counts as unset.
    variable: &'a dyn Fn(&str) -> Option<String>,
    /// The content of a file, or why it cannot be read.
    file: &'a dyn Fn(&str) -> Result<String, String>,
}

/// What this process was told. Ends it where clap has something to say.
///
/// # Errors
/// When a file cannot be read, or a variable and its file are both named.
pub(crate) fn arguments() -> Result<Arguments> {
    let around = Around {
        variable: &|name| std::env::var(name).ok().filter(|value| !value.is_empty()),
        file: &|path| std::fs::read_to_string(path).map_err(|error| error.to_string()),
    };
    let mut wrong = Vec::new();
    let parsed = with_files(Arguments::command(), &around, &mut wrong).try_get_matches();
    let asks = match &parsed {
        Ok(matches) => !matches.subcommand_name().is_some_and(|name| WITHOUT_SETTINGS.contains(&name)),
        // Help and version are no errors.
        Err(error) => error.use_stderr(),
    };
    if asks && !wrong.is_empty() {
        return Err(anyhow!(wrong.join("; ")));
    }
    let parsed = parsed.and_then(|matches| Arguments::from_arg_matches(&matches));
    Ok(parsed.unwrap_or_else(|error| error.exit()))
}

/// The command with what files say as defaults, which are not shown.
fn with_files(command: Command, around: &Around<'_>, wrong: &mut Vec<String>) -> Command {
    command
        .mut_args(|argument| with_file(argument, around, wrong))
        .mut_subcommands(|command| with_files(command, around, wrong))
}

fn with_file(argument: Arg, around: &Around<'_>, wrong: &mut Vec<String>) -> Arg {
    let Some(name) = argument.get_env().map(|name| name.to_string_lossy().into_owned()) else { return argument };
    let named = format!("{name}_FILE");
    let path = (around.variable)(&named);
    if (around.variable)(&name).is_some() {
        if path.is_some() {
            tell(wrong, format!("{name} and {named} are both set"));
        }
        return argument;
    }
    let Some(path) = path else {
        // Clap would take an empty variable for a value.
        let is_empty = std::env::var_os(&name).is_some_and(|value| value.is_empty());
        return if is_empty { argument.env(Resettable::<OsStr>::Reset) } else { argument };
    };
    match (around.file)(&path) {
        Ok(text) => {
            // Read once, for as long as the process lives.
            let value: &'static str = text.trim_end_matches(['\r', '\n']).to_owned().leak();
            let argument = argument.env(Resettable::<OsStr>::Reset).required(false);
            argument.default_value(value).hide_default_value(true)
        }
        Err(error) => {
            tell(wrong, format!("{named}: {error}"));
            argument
        }
    }
}

/// Once, though many commands take the same setting.
fn tell(wrong: &mut Vec<String>, line: String) {
    if !wrong.contains(&line) {
        wrong.push(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "RELAYCTL_TEST_URL";
    const FILE: &str = "RELAYCTL_TEST_URL_FILE";

    /// What a command two levels down gets for its setting, and what was wrong.
    fn given(variables: &[(&str, &str)], arguments: &[&str]) -> (Option<String>, Vec<String>) {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let file = |path: &str| if path == "/s" { Ok("from a file\n".to_owned()) } else { Err("not found".to_owned()) };
        let inner = Command::new("inner").arg(Arg::new("url").long("url").env(NAME).required(true));
        let outer = Command::new("relayctl").subcommand(Command::new("outer").subcommand(inner));
        let mut wrong = Vec::new();
        let command = with_files(outer, &Around { variable: &variable, file: &file }, &mut wrong);
        let line = [&["relayctl", "outer", "inner"][..], arguments].concat();
        let matches = command.try_get_matches_from(line).ok();
        let url = matches.and_then(|matches| {
            let (_, outer) = matches.subcommand()?;
            outer.subcommand()?.1.get_one::<String>("url").cloned()
        });
        (url, wrong)
    }

    #[test]
    fn a_setting_is_read_from_the_file_that_is_named() {
        let named = (FILE, "/s");
        assert_eq!(given(&[named], &[]), (Some("from a file".to_owned()), vec![]));
        assert_eq!(given(&[named], &["--url", "from a flag"]), (Some("from a flag".to_owned()), vec![]));
        assert_eq!(given(&[], &[]), (None, vec![]));
        assert_eq!(given(&[(FILE, "/none")], &[]), (None, vec![format!("{FILE}: not found")]));
        let (_, wrong) = given(&[named, (NAME, "from a variable")], &[]);
        assert_eq!(wrong, [format!("{NAME} and {FILE} are both set")]);
    }
}
