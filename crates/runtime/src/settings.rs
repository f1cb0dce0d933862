//! A program's settings: flags, environment, files of secrets, and an optional TOML file, with everything that is wrong told at once.
//!
//! The clap definition of a program says which settings there are; this reads them from more places. A setting with the variable `NAME` and the
//! flag `--name` is taken from the first of:
//!
//! 1. the flag,
//! 2. the variable `NAME`,
//! 3. the file that the variable `NAME_FILE` names, without the line end at its end: secrets as files,
//! 4. `name` (as the flag, with `_` for `-`) in the TOML file that `RELAY_CONFIG` names,
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

use self::explain::{explained, explained_json};
use crate::otel::Wanted;

/// Names the TOML file.
const CONFIG_FILE: &str = "RELAY_CONFIG";
const CHECK: &str = "--config-check";
const EXPLAIN: &str = "--config-explain";
/// With one of the two: answers programs.
const JSON: &str = "--config-json";

/// The settings of a program, and the rules that bind several of them.
pub trait Settings: Parser {
    /// What is wrong with settings together, though each could be used alone: a line each. Asked whatever else is wrong, so that all of it is
    /// told at once; that is why such rules are not clap's.
    fn clashes(values: &Values) -> Vec<String>;
}

/// Settings as text, given or by default, by their variables.
#[derive(Debug, Default)]
pub struct Values(BTreeMap<String, String>);

impl Values {
    /// The value of the setting with that variable; none if it has none, or an empty one.
    #[must_use]
    pub fn of(&self, variable: &str) -> Option<&str> {
        self.0.get(variable).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Says that a setting is of no use without another, if it is there alone.
    #[must_use]
    pub fn lone(&self, variable: &str, needs: &str) -> Option<String> {
        let lone = self.of(variable).is_some() && self.of(needs).is_none();
        lone.then(|| format!("{variable} is of no use without {needs}"))
    }
}

/// What a program was told.
#[derive(Debug)]
pub enum Told<T> {
    /// To run.
    Run(T),
    /// To print this and end: 0 if all is well, else 1.
    Print {
        /// What to print.
        text: String,
        /// Whether the settings can be used.
        well: bool,
    },
}

/// Where settings come from besides flags.
pub trait Surroundings {
    /// The value of a variable; an empty one counts as unset.
    fn variable(&self, name: &str) -> Option<String>;
    /// The content of a file, or why it cannot be read.
    fn file(&self, path: &str) -> Result<String, String>;
}

/// The process's own environment and files.
#[derive(Debug, Clone, Copy)]
pub struct Process;

impl Surroundings for Process {
    fn variable(&self, name: &str) -> Option<String> {
        // One that is no text is told as wrong, not taken for unset.
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        Some(value).filter(|value| !value.is_empty())
    }

    fn file(&self, path: &str) -> Result<String, String> {
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    }
}

/// Reads the settings of this process. `None`: it was only asked to check or explain them, has done so, and should end.
///
/// # Errors
/// With everything that is wrong.
pub fn read<T: Settings>() -> AnyResult<Option<T>> {
    let arguments: Vec<String> = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    match told::<T>(&arguments, &Process).map_err(|wrong| anyhow!(wrong))? {
        Told::Run(settings) => Ok(Some(settings)),
        Told::Print { text, well } => {
            println!("{text}");
            if !well {
                bail!("the configuration cannot be used");
            }
            Ok(None)
        }
    }
}

/// The same from given surroundings.
///
/// # Errors
/// All that is wrong, a line each.
pub fn told<T: Settings>(arguments: &[String], around: &impl Surroundings) -> Result<Told<T>, String> {
    let wants = |flag: &str| arguments.iter().skip(1).any(|argument| argument == flag);
    let (check, explain, json) = (wants(CHECK), wants(EXPLAIN), wants(JSON));
    let own: Vec<String> =
        arguments.iter().filter(|argument| ![CHECK, EXPLAIN, JSON].contains(&argument.as_str())).cloned().collect();
    // Help and version are clap's.
    if own.iter().skip(1).any(|argument| matches!(argument.as_str(), "--help" | "-h" | "--version" | "-V")) {
        return Ok(Told::Run(T::parse_from(&own)));
    }
    let mut settings = gather(&T::command(), &own, around);
    settings.wrong.extend(T::clashes(&settings.values()));
    if explain {
        let text = if json { explained_json(&settings, around) } else { explained(&settings, around) };
        return Ok(Told::Print { text, well: settings.wrong.is_empty() });
    }
    let mut parsed = None;
    if settings.wrong.is_empty() {
        // What the environment says is on the line by now. Asked again it would say that an empty variable is a value.
        let command = T::command().mut_args(|argument| argument.env(Resettable::<clap::builder::OsStr>::Reset));
        let matched = command.try_get_matches_from(settings.line(&own));
        match matched.and_then(|matches| T::from_arg_matches(&matches)) {
            Ok(good) => parsed = Some(good),
            Err(error) => settings.wrong.push(first_line(&error)),
        }
    }
    match parsed {
        _ if check && json => {
            let well = settings.wrong.is_empty();
            Ok(Told::Print { text: pretty(&json!({ "usable": well, "wrong": settings.wrong })), well })
        }
        None => Err(all(&settings.wrong)),
        Some(_) if check => Ok(Told::Print { text: "the configuration can be used".to_owned(), well: true }),
        Some(parsed) => Ok(Told::Run(parsed)),
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}")
}

fn all(wrong: &[String]) -> String {
    let lines: Vec<String> = wrong.iter().map(|line| format!("  - {line}")).collect();
    format!("the configuration cannot be used:\n{}", lines.join("\n"))
}

/// One setting of the program.
struct Setting {
    flag: String,
    variable: Option<String>,
    secret: bool,
    help: String,
    /// Where the value comes from, and the value.
    given: Option<(String, String)>,
    default: Option<String>,
}

struct Gathered {
    all: Vec<Setting>,
    wrong: Vec<String>,
}

impl Gathered {
    fn values(&self) -> Values {
        let values = self.all.iter().filter_map(|setting| {
            let value = setting.given.as_ref().map(|(_, value)| value).or(setting.default.as_ref())?;
            Some((setting.variable.clone()?, value.clone()))
        });
        Values(values.collect())
    }

    /// The command line with what was found elsewhere as further flags.
    fn line(&self, own: &[String]) -> Vec<OsString> {
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

fn gather(command: &Command, own: &[String], around: &impl Surroundings) -> Gathered {
    let mut wrong = Vec::new();
    let mut file = file::settings(around, &mut wrong);
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
            .or_else(|| from_variables(variable.as_deref(), around, &mut wrong))
            .or_else(|| in_file.filter(|value| !value.is_empty()).map(|value| (CONFIG_FILE.to_owned(), value)));
        if let Some((place, value)) = &given
            && let Err(error) = try_one(argument, value)
        {
            wrong.push(format!("{} (from {place}): {error}", variable.as_deref().unwrap_or(&flag)));
        }
        if given.is_none() && argument.is_required_set() {
            wrong.push(format!("{} is missing", variable.as_deref().unwrap_or(&flag)));
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
    // The standard variables of telemetry are no settings of a program, and can be as wrong.
    Wanted::of(around, &mut wrong);
    for unknown in file.keys() {
        wrong.push(format!("{unknown} (in the file that {CONFIG_FILE} names) is no setting of this program"));
    }
    Gathered { all: settings, wrong }
}

/// The flag's value on the command line, if it is there.
fn flag_value(own: &[String], flag: &str) -> Option<String> {
    let name = format!("--{flag}");
    own.iter().enumerate().skip(1).find_map(|(index, argument)| {
        if *argument == name {
            return Some(own.get(index + 1).cloned().unwrap_or_default());
        }
        argument.strip_prefix(&name)?.strip_prefix('=').map(str::to_owned)
    })
}

fn from_variables(
    variable: Option<&str>,
    around: &impl Surroundings,
    wrong: &mut Vec<String>,
) -> Option<(String, String)> {
    let variable = variable?;
    let named = format!("{variable}_FILE");
    let path = around.variable(&named);
    if let Some(value) = around.variable(variable) {
        if path.is_some() {
            wrong.push(format!("{variable} and {named} are both set"));
        }
        if value.contains(char::REPLACEMENT_CHARACTER) {
            wrong.push(format!("{variable} is not UTF-8"));
        }
        return Some((variable.to_owned(), value));
    }
    match around.file(&path?) {
        Ok(text) => {
            let value = text.trim_end_matches(['\r', '\n']);
            (!value.is_empty()).then(|| (named, value.to_owned()))
        }
        Err(error) => {
            wrong.push(format!("{named}: {error}"));
            None
        }
    }
}

/// Whether the value alone can be used for the setting: what clap says of it, if not.
fn try_one(argument: &Arg, value: &str) -> Result<(), String> {
    let alone = Arg::new("setting")
        .long("setting")
        .value_parser(argument.get_value_parser().clone())
        .value_delimiter(argument.get_value_delimiter())
        .action(argument.get_action().clone());
    Command::new("-")
        .arg(alone)
        .try_get_matches_from(["-".to_owned(), format!("--setting={value}")])
        .map(drop)
        .map_err(|error| cause(&error))
}

/// The reason in clap's message, without the value, which may be a secret.
fn cause(error: &clap::Error) -> String {
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
        /// Where Postgres is.
        #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
        database_url: String,
        /// How many.
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
        fn clashes(values: &Values) -> Vec<String> {
            values.lone("RELAY_NETWORKS", "DATABASE_URL").into_iter().collect()
        }
    }

    fn parse_json(text: &str) -> Result<Value, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[derive(Default)]
    struct Given {
        variables: BTreeMap<&'static str, &'static str>,
        files: BTreeMap<&'static str, &'static str>,
    }

    impl Surroundings for Given {
        fn variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).map(|&value| value.to_owned())
        }

        fn file(&self, path: &str) -> Result<String, String> {
            self.files.get(path).map(|&text| text.to_owned()).ok_or_else(|| "not found".to_owned())
        }
    }

    fn given(variables: &[(&'static str, &'static str)], files: &[(&'static str, &'static str)]) -> Given {
        Given { variables: variables.iter().copied().collect(), files: files.iter().copied().collect() }
    }

    fn run(arguments: &[&str], around: &Given) -> Result<Told<Config>, String> {
        let arguments: Vec<String> = [&["x"], arguments].concat().into_iter().map(str::to_owned).collect();
        told(&arguments, around)
    }

    fn config(arguments: &[&str], around: &Given) -> Config {
        match run(arguments, around) {
            Ok(Told::Run(config)) => config,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_place_counts() {
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
    fn everything_that_is_wrong_is_told_at_once() {
        let around = given(
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
        let told = run(&[], &around).unwrap_err();
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
            assert!(told.contains(part), "{part} is not in {told}");
        }
        let by_flag = run(&["--count", "12"], &Given::default()).unwrap_err();
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
    fn a_wrong_secret_is_not_repeated() {
        let around = given(&[("DATABASE_URL", "a"), ("RELAY_PLANS", "sesame")], &[]);
        let told = run(&[], &around).unwrap_err();
        assert!(told.contains("RELAY_PLANS") && !told.contains("sesame"), "{told}");
    }

    #[test]
    fn checking_and_explaining_run_nothing() {
        let telemetry = [("RUST_LOG", "warn"), ("OTEL_EXPORTER_OTLP_HEADERS", "x=sesame")];
        let good = given(&[("DATABASE_URL", "postgres://a:secret@b"), telemetry[0], telemetry[1]], &[]);
        assert!(matches!(run(&["--config-check"], &good), Ok(Told::Print { well: true, .. })));
        assert!(run(&["--config-check"], &Given::default()).is_err());
        match run(&["--config-explain"], &good) {
            Ok(Told::Print { text, well: true }) => {
                assert!(
                    text.contains("DATABASE_URL\n    (not shown)  from DATABASE_URL\n    Where Postgres is"),
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
    fn programs_are_answered_with_json() {
        let printed = |arguments: &[&str], around: &Given| match run(arguments, around) {
            Ok(Told::Print { text, well }) => (serde_json::from_str::<Value>(&text).unwrap(), well),
            other => panic!("{other:?}"),
        };
        let good = given(&[("DATABASE_URL", "postgres://a:secret@b")], &[]);
        let (check, explain) = (["--config-check", "--config-json"], ["--config-explain", "--config-json"]);
        assert_eq!(printed(&check, &good), (json!({ "usable": true, "wrong": [] }), true));
        let (told, well) = printed(&check, &Given::default());
        assert_eq!((told, well), (json!({ "usable": false, "wrong": ["DATABASE_URL is missing"] }), false));
        let (told, _) = printed(&explain, &good);
        let (url, count) = (&told["settings"][0], &told["settings"][1]);
        assert_eq!((&url["value"], &url["from"], &url["secret"]), (&Value::Null, &json!("DATABASE_URL"), &json!(true)));
        assert_eq!((&count["value"], &count["from"]), (&json!("4"), &json!("default")));
        assert!(!told.to_string().contains("secret@"), "{told}");
    }
}
