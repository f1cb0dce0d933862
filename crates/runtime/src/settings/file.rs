//! Optional TOML file of settings.

use std::collections::BTreeMap;

use super::{CONFIG_FILE, Environment};

/// Reads the settings of the TOML file as text.
pub(super) fn read_settings(environment: &impl Environment, problems: &mut Vec<String>) -> BTreeMap<String, String> {
    let Some(path) = environment.variable(CONFIG_FILE) else { return BTreeMap::new() };
    let read = environment.file(&path).and_then(|text| text.parse::<toml::Table>().map_err(|error| error.to_string()));
    let table = match read {
        Ok(table) => table,
        Err(error) => {
            problems.push(format!("{CONFIG_FILE} ({path}): {error}"));
            return BTreeMap::new();
        }
    };
    let mut settings = BTreeMap::new();
    for (name, value) in table {
        match value_to_text(&value) {
            Some(text) => {
                settings.insert(name, text);
            }
            None => problems
                .push(format!("{name} (in the file that {CONFIG_FILE} names) is neither a value nor a list of values")),
        }
    }
    settings
}

/// Converts a value to the text that the variable would have: lists with commas, tables as JSON.
fn value_to_text(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        // Switches are written as words.
        toml::Value::Boolean(on) => Some(if *on { "on" } else { "off" }.to_owned()),
        toml::Value::Array(values) => {
            values.iter().map(value_to_text).collect::<Option<Vec<_>>>().map(|texts| texts.join(","))
        }
        toml::Value::Table(_) => serde_json::to_string(value).ok(),
        toml::Value::Datetime(_) => None,
    }
}
