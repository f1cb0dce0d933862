//! Output of `--config-explain`: each setting with its value, source and meaning.

use serde_json::{Value, json};

use super::{CollectedSettings, Environment, to_pretty_json};
use crate::otel::VARIABLES;

pub(super) fn explain_as_text(settings: &CollectedSettings, environment: &impl Environment) -> String {
    let mut text = String::new();
    for setting in &settings.all {
        let name = setting.variable.clone().unwrap_or_else(|| format!("--{}", setting.flag));
        let displayed = |value: &str| if setting.secret { "(not shown)".to_owned() } else { value.to_owned() };
        let value = match (&setting.given, &setting.default) {
            (Some((place, value)), _) => format!("{}  from {place}", displayed(value)),
            (None, Some(default)) if !default.is_empty() => format!("{default}  by default"),
            (None, _) => "unset".to_owned(),
        };
        text.push_str(&format!("{name}\n    {value}\n    {}\n", setting.help));
    }
    for variable in VARIABLES {
        let value = match environment.variable(variable.name) {
            Some(_) if variable.secret => format!("(not shown)  from {}", variable.name),
            Some(value) => format!("{value}  from {}", variable.name),
            None if variable.default.is_empty() => "unset".to_owned(),
            None => format!("{}  by default", variable.default),
        };
        text.push_str(&format!("{}\n    {value}\n    {}\n", variable.name, variable.help));
    }
    for line in &settings.problems {
        text.push_str(&format!("WRONG: {line}\n"));
    }
    text.trim_end().to_owned()
}

/// Renders the settings as JSON. Secrets never have a value, whether set or not.
pub(super) fn explain_as_json(settings: &CollectedSettings, environment: &impl Environment) -> String {
    let own = settings.all.iter().map(|setting| {
        let (from, value) = match (&setting.given, &setting.default) {
            (Some((place, value)), _) => (Some(place.as_str()), Some(value)),
            (None, Some(default)) if !default.is_empty() => (Some("default"), Some(default)),
            (None, _) => (None, None),
        };
        json!({
            "name": setting.variable, "flag": format!("--{}", setting.flag), "from": from, "secret": setting.secret,
            "value": value.filter(|_| !setting.secret), "help": setting.help,
        })
    });
    let telemetry = VARIABLES.iter().map(|variable| {
        let given = environment.variable(variable.name);
        let default = Some(variable.default.to_owned()).filter(|default| !default.is_empty());
        let from = if given.is_some() { Some(variable.name) } else { default.as_ref().map(|_| "default") };
        json!({
            "name": variable.name, "flag": Value::Null, "from": from, "secret": variable.secret,
            "value": given.or(default).filter(|_| !variable.secret), "help": variable.help,
        })
    });
    let displayed: Vec<Value> = own.chain(telemetry).collect();
    to_pretty_json(
        &json!({ "usable": settings.problems.is_empty(), "wrong": settings.problems, "settings": displayed }),
    )
}
