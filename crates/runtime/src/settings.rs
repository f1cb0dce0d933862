//! Settings of a program: flags, environment, secret files and an optional TOML file, with all problems reported at
//! once.
//!
//! The clap definition of a program declares its settings; this module reads them from more places. [`read`] is called
//! by `main`. A setting with the variable `NAME` and the flag `--name` is taken from the first of:
//!
//! 1. the flag,
//! 2. the variable `NAME`,
//! 3. the file named by the variable `NAME_FILE`, without trailing line ends,
//! 4. `name` (the flag with `_` for `-`) in the TOML file named by `RELAY_CONFIG`,
//! 5. its default.
//!
//! An empty value counts as unset.

mod explain;
mod file;

use std::collections::BTreeMap;
use std::ffi::OsString;

use anyhow::{Result as AnyResult, anyhow, bail};
use clap::{Arg, ArgAction, Command, Parser, builder::Resettable};
use serde_json::{Value, json};

use self::explain::{explain_as_json, explain_as_text};
pub use crate::environment::{Environment, ProcessEnvironment};
use crate::otel::TelemetryConfig;

/// Variable that names the TOML file.
const CONFIG_FILE: &str = "RELAY_CONFIG";
const CHECK: &str = "--config-check";
const EXPLAIN: &str = "--config-explain";
/// Makes one of the two print JSON.
const JSON: &str = "--config-json";

/// Settings of a program, with the rules that involve several of them.
pub trait Settings: Parser {
    /// Returns the problems of settings in combination, one per line. Called even if other problems were found, so
    /// that all are reported at once; clap stops at the first, so such rules are not clap's.
    fn check_combinations(values: &Values) -> Vec<String>;
}

/// Settings as text by variable name, explicit or default.
#[derive(Debug, Default)]
pub struct Values(BTreeMap<String, String>);

impl Values {
    /// Returns the value of a setting; `None` if it is unset or empty.
    #[must_use]
    pub fn get(&self, variable: &str) -> Option<&str> {
        self.0.get(variable).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns a problem if a setting is present without the one it requires.
    #[must_use]
    pub fn require_with(&self, variable: &str, needs: &str) -> Option<String> {
        let unusable = self.get(variable).is_some() && self.get(needs).is_none();
        unusable.then(|| format!("{variable} is of no use without {needs}"))
    }
}

/// Result of reading the settings.
#[derive(Debug)]
pub enum Startup<T> {
    /// Run with these settings.
    Run(T),
    /// Print this and exit: with 0 if the settings are valid, otherwise with 1.
    Print { text: String, usable: bool },
}

/// Reads the settings of this process. `None` if it was only asked to check or explain them, which has been done.
///
/// # Errors
/// Lists every problem.
#[expect(clippy::print_stdout, reason = "the process was only asked for this text")]
pub fn read<T: Settings>() -> AnyResult<Option<T>> {
    let arguments: Vec<String> = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    match resolve::<T>(&arguments, &ProcessEnvironment).map_err(|problems| anyhow!(problems))? {
        Startup::Run(settings) => Ok(Some(settings)),
        Startup::Print { text, usable } => {
            println!("{text}");
            if !usable {
                bail!("the configuration cannot be used");
            }
            Ok(None)
        }
    }
}

/// Reads the settings from an environment.
///
/// # Errors
/// Lists every problem, one per line.
pub fn resolve<T: Settings>(arguments: &[String], environment: &impl Environment) -> Result<Startup<T>, String> {
    let wants = |flag: &str| arguments.iter().skip(1).any(|argument| argument == flag);
    let (check, explain, json) = (wants(CHECK), wants(EXPLAIN), wants(JSON));
    let own: Vec<String> =
        arguments.iter().filter(|argument| ![CHECK, EXPLAIN, JSON].contains(&argument.as_str())).cloned().collect();
    // clap handles help and version.
    if own.iter().skip(1).any(|argument| matches!(argument.as_str(), "--help" | "-h" | "--version" | "-V")) {
        return Ok(Startup::Run(T::parse_from(&own)));
    }
    let mut settings = collect_settings(&T::command(), &own, environment);
    settings.problems.extend(T::check_combinations(&settings.values()));
    if explain {
        let text = if json { explain_as_json(&settings, environment) } else { explain_as_text(&settings, environment) };
        return Ok(Startup::Print { text, usable: settings.problems.is_empty() });
    }
    let mut parsed = None;
    if settings.problems.is_empty() {
        // The environment's values are on the command line by now. clap would also read empty variables as values.
        let command = T::command().mut_args(|argument| argument.env(Resettable::<clap::builder::OsStr>::Reset));
        let matched = command.try_get_matches_from(settings.to_command_line(&own));
        match matched.and_then(|matches| T::from_arg_matches(&matches)) {
            Ok(config_parsed) => parsed = Some(config_parsed),
            Err(error) => settings.problems.push(first_line(&error)),
        }
    }
    match parsed {
        _ if check && json => {
            let usable = settings.problems.is_empty();
            Ok(Startup::Print {
                text: to_pretty_json(&json!({ "usable": usable, "wrong": settings.problems })),
                usable,
            })
        }
        None => Err(format_problems(&settings.problems)),
        Some(_) if check => Ok(Startup::Print { text: "the configuration can be used".to_owned(), usable: true }),
        Some(parsed) => Ok(Startup::Run(parsed)),
    }
}

fn to_pretty_json(value: &Value) -> String {
    format!("{value:#}")
}

fn format_problems(problems: &[String]) -> String {
    let lines: Vec<String> = problems.iter().map(|line| format!("  - {line}")).collect();
    format!("the configuration cannot be used:\n{}", lines.join("\n"))
}

struct Setting {
    flag: String,
    variable: Option<String>,
    secret: bool,
    help: String,
    /// Source and value, if set explicitly.
    given: Option<(String, String)>,
    default: Option<String>,
}

struct CollectedSettings {
    all: Vec<Setting>,
    problems: Vec<String>,
}

impl CollectedSettings {
    fn values(&self) -> Values {
        let values = self.all.iter().filter_map(|setting| {
            let value = setting.given.as_ref().map(|(_, value)| value).or(setting.default.as_ref())?;
            Some((setting.variable.clone()?, value.clone()))
        });
        Values(values.collect())
    }

    /// Returns the command line, with values from other sources added as flags.
    fn to_command_line(&self, own: &[String]) -> Vec<OsString> {
        let mut line: Vec<OsString> = own.iter().map(OsString::from).collect();
        for setting in &self.all {
            if let Some((place, value)) = &setting.given
                && place != "flag"
            {
                line.push(format!("--{}={value}", setting.flag).into());
            }
        }
        line
    }
}

fn collect_settings(command: &Command, own: &[String], environment: &impl Environment) -> CollectedSettings {
    let mut problems = Vec::new();
    let mut file = file::read_settings(environment, &mut problems);
    let mut settings = Vec::new();
    for argument in command.get_arguments().filter(|argument| argument.get_long().is_some()) {
        let flag = argument.get_long().unwrap_or_default().to_owned();
        if matches!(argument.get_action(), ArgAction::Help | ArgAction::Version) {
            continue;
        }
        let variable = argument.get_env().map(|name| name.to_string_lossy().into_owned());
        let in_file = file.remove(&flag.replace('-', "_"));
        let given = flag_value(own, &flag)
            .map(|value| ("flag".to_owned(), value))
            .or_else(|| read_variable(variable.as_deref(), environment, &mut problems))
            .or_else(|| in_file.filter(|value| !value.is_empty()).map(|value| (CONFIG_FILE.to_owned(), value)));
        // Each value is checked on its own, because clap stops at the first problem of a command line.
        if let Some((place, value)) = &given
            && let Err(error) = check_value(argument, value)
        {
            problems.push(format!("{} (from {place}): {error}", variable.as_deref().unwrap_or(&flag)));
        }
        if given.is_none() && argument.is_required_set() {
            problems.push(format!("{} is missing", variable.as_deref().unwrap_or(&flag)));
        }
        let default: Vec<_> =
            argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
        settings.push(Setting {
            secret: argument.is_hide_env_values_set(),
            help: argument.get_help().map(ToString::to_string).unwrap_or_default(),
            default: (!default.is_empty()).then(|| default.join(",")),
            flag,
            variable,
            given,
        });
    }
    // The telemetry variables are not settings of a program, but are validated with them.
    TelemetryConfig::from_environment(environment, &mut problems);
    for unknown in file.keys() {
        problems.push(format!("{unknown} (in the file that {CONFIG_FILE} names) is no setting of this program"));
    }
    CollectedSettings { all: settings, problems }
}

/// Returns the flag's value on the command line.
fn flag_value(own: &[String], flag: &str) -> Option<String> {
    let name = format!("--{flag}");
    own.iter().enumerate().skip(1).find_map(|(index, argument)| {
        if *argument == name {
            return Some(own.get(index + 1).cloned().unwrap_or_default());
        }
        argument.strip_prefix(&name)?.strip_prefix('=').map(str::to_owned)
    })
}

fn read_variable(
    variable: Option<&str>,
    environment: &impl Environment,
    problems: &mut Vec<String>,
) -> Option<(String, String)> {
    let variable = variable?;
    let named = format!("{variable}_FILE");
    let path = environment.variable(&named);
    if let Some(value) = environment.variable(variable) {
        if path.is_some() {
            problems.push(format!("{variable} and {named} are both set"));
        }
        if value.contains(char::REPLACEMENT_CHARACTER) {
            problems.push(format!("{variable} is not UTF-8"));
        }
        return Some((variable.to_owned(), value));
    }
    match environment.file(&path?) {
        Ok(text) => {
            let value = text.trim_end_matches(['\r', '\n']);
            (!value.is_empty()).then(|| (named, value.to_owned()))
        }
        Err(error) => {
            problems.push(format!("{named}: {error}"));
            None
        }
    }
}

/// Checks a value with clap's parser of the setting alone.
fn check_value(argument: &Arg, value: &str) -> Result<(), String> {
    let alone = Arg::new("setting")
        .long("setting")
        .value_parser(argument.get_value_parser().clone())
        .value_delimiter(argument.get_value_delimiter())
        .action(argument.get_action().clone());
    Command::new("-")
        .arg(alone)
        .try_get_matches_from(["-".to_owned(), format!("--setting={value}")])
        .map(drop)
        .map_err(|error| error_reason(&error))
}

/// Extracts the reason from clap's message, without the value, which may be a secret.
fn error_reason(error: &clap::Error) -> String {
    let line = first_line(error);
    line.rsplit_once("': ").map_or_else(|| line.clone(), |(_, reason)| reason.to_owned())
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text
        .lines()
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "x")]
    struct Config {
        /// URL of Postgres.
        #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
        database_url: String,
        /// Number of items.
        #[arg(long, env = "RELAY_COUNT", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=9))]
        count: u8,
        /// Networks.
        #[arg(long, env = "RELAY_NETWORKS", value_delimiter = ',')]
        networks: Vec<std::net::IpAddr>,
        /// Goes with the count.
        #[arg(long, env = "RELAY_PLANS", default_value = "{}", value_parser = parse_json)]
        plans: Value,
    }

    impl Settings for Config {
        fn check_combinations(values: &Values) -> Vec<String> {
            values.require_with("RELAY_NETWORKS", "DATABASE_URL").into_iter().collect()
        }
    }

    fn parse_json(text: &str) -> Result<Value, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[derive(Default)]
    struct TestEnvironment {
        variables: BTreeMap<&'static str, &'static str>,
        files: BTreeMap<&'static str, &'static str>,
    }

    impl Environment for TestEnvironment {
        fn variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).map(|&value| value.to_owned())
        }

        fn file(&self, path: &str) -> Result<String, String> {
            self.files.get(path).map(|&text| text.to_owned()).ok_or_else(|| "not found".to_owned())
        }
    }

    fn given(variables: &[(&'static str, &'static str)], files: &[(&'static str, &'static str)]) -> TestEnvironment {
        TestEnvironment { variables: variables.iter().copied().collect(), files: files.iter().copied().collect() }
    }

    fn run(arguments: &[&str], environment: &TestEnvironment) -> Result<Startup<Config>, String> {
        let arguments: Vec<String> = [&["x"], arguments].concat().into_iter().map(str::to_owned).collect();
        resolve(&arguments, environment)
    }

    fn config(arguments: &[&str], environment: &TestEnvironment) -> Config {
        match run(arguments, environment) {
            Ok(Startup::Run(config)) => config,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_source_takes_precedence() {
        let file = (
            "/c.toml",
            "database_url = \"postgres://file\"\ncount = 3\nnetworks = [\"10.0.0.1\", \"10.0.0.2\"]\n[plans]\nfree = 1\n",
        );
        let toml = ("RELAY_CONFIG", "/c.toml");
        let all = config(&[], &given(&[toml], &[file]));
        assert_eq!((all.database_url.as_str(), all.count, all.networks.len()), ("postgres://file", 3, 2));
        assert_eq!(all.plans, json!({ "free": 1 }));
        let secret = ("DATABASE_URL_FILE", "/s");
        let by_file = config(&[], &given(&[toml, secret], &[file, ("/s", "postgres://secret\n")]));
        assert_eq!(by_file.database_url, "postgres://secret");
        let by_variable = given(&[toml, ("DATABASE_URL", "postgres://env"), ("RELAY_COUNT", "5")], &[file]);
        assert_eq!(
            (config(&[], &by_variable).database_url.as_str(), config(&[], &by_variable).count),
            ("postgres://env", 5)
        );
        assert_eq!(config(&["--count", "6"], &by_variable).count, 6);
        assert_eq!(config(&["--count=7"], &by_variable).count, 7);
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let environment = given(
            &[
                ("RELAY_CONFIG", "/c.toml"),
                ("RELAY_COUNT", "12"),
                ("RELAY_NETWORKS", "10.0.0.1,here"),
                ("RELAY_PLANS_FILE", "/none"),
                ("RUST_LOG", "info,relay=loud"),
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
            ],
            &[("/c.toml", "colour = \"red\"\n")],
        );
        let message = run(&[], &environment).unwrap_err();
        for part in [
            "DATABASE_URL is missing",
            "RELAY_COUNT (from RELAY_COUNT)",
            "RELAY_NETWORKS (from RELAY_NETWORKS)",
            "RELAY_NETWORKS is of no use without DATABASE_URL",
            "RELAY_PLANS_FILE: not found",
            "colour",
            "RUST_LOG: ",
            "OTEL_EXPORTER_OTLP_ENDPOINT: ",
        ] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
        let by_flag = run(&["--count", "12"], &TestEnvironment::default()).unwrap_err();
        assert!(
            by_flag.contains("RELAY_COUNT (from flag)") && by_flag.contains("DATABASE_URL is missing"),
            "{by_flag}"
        );
        let both = given(&[("DATABASE_URL", "a"), ("DATABASE_URL_FILE", "/s")], &[("/s", "b")]);
        assert!(run(&[], &both).unwrap_err().contains("are both set"));
        let broken = given(&[("DATABASE_URL", "a"), ("RELAY_CONFIG", "/c.toml")], &[("/c.toml", "count = ")]);
        assert!(run(&[], &broken).unwrap_err().contains("RELAY_CONFIG (/c.toml)"));
    }

    #[test]
    fn an_invalid_secret_is_not_printed() {
        let environment = given(&[("DATABASE_URL", "a"), ("RELAY_PLANS", "sesame")], &[]);
        let message = run(&[], &environment).unwrap_err();
        assert!(message.contains("RELAY_PLANS") && !message.contains("sesame"), "{message}");
    }

    #[test]
    fn checking_and_explaining_do_not_run_the_program() {
        let telemetry = [("RUST_LOG", "warn"), ("OTEL_EXPORTER_OTLP_HEADERS", "x=sesame")];
        let config_parsed = given(&[("DATABASE_URL", "postgres://a:secret@b"), telemetry[0], telemetry[1]], &[]);
        assert!(matches!(run(&["--config-check"], &config_parsed), Ok(Startup::Print { usable: true, .. })));
        assert!(run(&["--config-check"], &TestEnvironment::default()).is_err());
        match run(&["--config-explain"], &config_parsed) {
            Ok(Startup::Print { text, usable: true }) => {
                assert!(
                    text.contains("DATABASE_URL\n    (not shown)  from DATABASE_URL\n    URL of Postgres"),
                    "{text}"
                );
                assert!(text.contains("RELAY_COUNT\n    4  by default"), "{text}");
                assert!(text.contains("RUST_LOG\n    warn  from RUST_LOG"), "{text}");
                assert!(text.contains("OTEL_EXPORTER_OTLP_HEADERS\n    (not shown)  from"), "{text}");
                assert!(text.contains("OTEL_SDK_DISABLED\n    unset"), "{text}");
                assert!(!text.contains("secret@") && !text.contains("sesame"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn json_output_reports_problems_and_sources() {
        let printed = |arguments: &[&str], environment: &TestEnvironment| match run(arguments, environment) {
            Ok(Startup::Print { text, usable }) => (serde_json::from_str::<Value>(&text).unwrap(), usable),
            other => panic!("{other:?}"),
        };
        let config_parsed = given(&[("DATABASE_URL", "postgres://a:secret@b")], &[]);
        let (check, explain) = (["--config-check", "--config-json"], ["--config-explain", "--config-json"]);
        assert_eq!(printed(&check, &config_parsed), (json!({ "usable": true, "wrong": [] }), true));
        let (message, usable) = printed(&check, &TestEnvironment::default());
        assert_eq!((message, usable), (json!({ "usable": false, "wrong": ["DATABASE_URL is missing"] }), false));
        let (message, _) = printed(&explain, &config_parsed);
        let (url, count) = (&message["settings"][0], &message["settings"][1]);
        assert_eq!((&url["value"], &url["from"], &url["secret"]), (&Value::Null, &json!("DATABASE_URL"), &json!(true)));
        assert_eq!((&count["value"], &count["from"]), (&json!("4"), &json!("default")));
        assert!(!message.to_string().contains("secret@"), "{message}");
    }
}
