//! Settings from secret files: a setting whose variable `NAME` is unset is read from the file named by `NAME_FILE`, as
//! in gateways and workers.

use anyhow::{Result, anyhow};
use clap::{Arg, Command, CommandFactory as _, FromArgMatches as _, builder::OsStr, builder::Resettable};

use crate::Arguments;

/// Commands without settings of this program; problems of settings do not concern them.
const COMMANDS_WITHOUT_SETTINGS: [&str; 2] = ["config", "completions"];

/// Source of settings besides flags.
struct Environment<'a> {
    /// Returns the value of a variable; an empty one counts as unset.
    variable: &'a dyn Fn(&str) -> Option<String>,
    /// Returns the content of a file, or why it cannot be read.
    file: &'a dyn Fn(&str) -> Result<String, String>,
}

/// Parses the arguments of this process. Exits if clap has something to print.
///
/// # Errors
/// If a file cannot be read, or a variable and its file are both named.
pub(crate) fn parse_arguments() -> Result<Arguments> {
    let environment = Environment {
        variable: &|name| std::env::var(name).ok().filter(|value| !value.is_empty()),
        file: &|path| std::fs::read_to_string(path).map_err(|error| error.to_string()),
    };
    let mut problems = Vec::new();
    let parsed = apply_secret_files(Arguments::command(), &environment, &mut problems).try_get_matches();
    let asks = match &parsed {
        Ok(matches) => !matches.subcommand_name().is_some_and(|name| COMMANDS_WITHOUT_SETTINGS.contains(&name)),
        // Help and version are not errors.
        Err(error) => error.use_stderr(),
    };
    // Before the errors of clap: a required value may be missing only because its file cannot be read.
    if asks && !problems.is_empty() {
        return Err(anyhow!(problems.join("; ")));
    }
    let parsed = parsed.and_then(|matches| Arguments::from_arg_matches(&matches));
    Ok(parsed.unwrap_or_else(|error| error.exit()))
}

/// Adds the contents of secret files to a command as hidden defaults.
fn apply_secret_files(command: Command, environment: &Environment<'_>, problems: &mut Vec<String>) -> Command {
    command
        .mut_args(|argument| apply_secret_file(argument, environment, problems))
        .mut_subcommands(|command| apply_secret_files(command, environment, problems))
}

fn apply_secret_file(argument: Arg, environment: &Environment<'_>, problems: &mut Vec<String>) -> Arg {
    let Some(name) = argument.get_env().map(|name| name.to_string_lossy().into_owned()) else { return argument };
    let named = format!("{name}_FILE");
    let path = (environment.variable)(&named);
    if (environment.variable)(&name).is_some() {
        if path.is_some() {
            add_problem(problems, format!("{name} and {named} are both set"));
        }
        return argument;
    }
    let Some(path) = path else {
        // clap would treat an empty variable as a value.
        let is_empty = std::env::var_os(&name).is_some_and(|value| value.is_empty());
        return if is_empty { argument.env(Resettable::<OsStr>::Reset) } else { argument };
    };
    match (environment.file)(&path) {
        Ok(text) => {
            // Leaked once: arguments live as long as the process.
            let value: &'static str = text.trim_end_matches(['\r', '\n']).to_owned().leak();
            let argument = argument.env(Resettable::<OsStr>::Reset).required(false);
            argument.default_value(value).hide_default_value(true)
        }
        Err(error) => {
            add_problem(problems, format!("{named}: {error}"));
            argument
        }
    }
}

/// Adds a problem once, although many commands share a setting.
fn add_problem(problems: &mut Vec<String>, line: String) {
    if !problems.contains(&line) {
        problems.push(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "RELAYCTL_TEST_URL";
    const FILE: &str = "RELAYCTL_TEST_URL_FILE";

    /// Returns the value that a command two levels down receives, and the problems.
    fn parse_url(variables: &[(&str, &str)], arguments: &[&str]) -> (Option<String>, Vec<String>) {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let file = |path: &str| if path == "/s" { Ok("from a file\n".to_owned()) } else { Err("not found".to_owned()) };
        let inner = Command::new("inner").arg(Arg::new("url").long("url").env(NAME).required(true));
        let outer = Command::new("relayctl").subcommand(Command::new("outer").subcommand(inner));
        let mut problems = Vec::new();
        let command = apply_secret_files(outer, &Environment { variable: &variable, file: &file }, &mut problems);
        let line = [&["relayctl", "outer", "inner"][..], arguments].concat();
        let matches = command.try_get_matches_from(line).ok();
        let url = matches.and_then(|matches| {
            let (_, outer) = matches.subcommand()?;
            outer.subcommand()?.1.get_one::<String>("url").cloned()
        });
        (url, problems)
    }

    #[test]
    fn a_setting_is_read_from_its_secret_file() {
        let named = (FILE, "/s");
        assert_eq!(parse_url(&[named], &[]), (Some("from a file".to_owned()), vec![]));
        assert_eq!(parse_url(&[named], &["--url", "from a flag"]), (Some("from a flag".to_owned()), vec![]));
        assert_eq!(parse_url(&[], &[]), (None, vec![]));
        assert_eq!(parse_url(&[(FILE, "/none")], &[]), (None, vec![format!("{FILE}: not found")]));
        let (_, problems) = parse_url(&[named, (NAME, "from a variable")], &[]);
        assert_eq!(problems, [format!("{NAME} and {FILE} are both set")]);
    }
}
