//! Inputs against the schemas of their actions.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// Characters of a problem that are told.
const MAX_PROBLEM_CHARS: usize = 300;

/// What is wrong with an input: where, and what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    /// JSON pointer into the input; empty for all of it.
    pub(super) path: String,
    /// For people.
    pub(super) message: String,
}

/// Compiles a schema. Patterns are matched in linear time; references lead nowhere but into the schema itself.
pub(super) fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::regex())
        .build(schema)
        .map_err(|error| shortened(&error.to_string()))
}

/// The first thing that is wrong with an input.
pub(super) fn check(schema: &Value, input: &Value) -> Result<(), Problem> {
    if schema.as_object().is_none_or(serde_json::Map::is_empty) {
        return Ok(());
    }
    // It compiled when it was stored; one that does not any more asks for nothing.
    let Ok(validator) = compile(schema) else { return Ok(()) };
    validator
        .validate(input)
        .map_err(|error| Problem { path: error.instance_path().to_string(), message: shortened(&error.to_string()) })
}

/// Messages quote what they met, which may be long.
fn shortened(message: &str) -> String {
    match message.char_indices().nth(MAX_PROBLEM_CHARS) {
        Some((at, _)) => format!("{}…", &message[..at]),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_problem_names_its_path() {
        let schema = json!({
            "type": "object", "required": ["ref"],
            "properties": { "ref": { "type": "string" }, "steps": { "type": "array", "items": { "type": "integer" } } },
        });
        let path = |input: Value| check(&schema, &input).map_err(|problem| problem.path);
        assert_eq!(path(json!({ "ref": "main", "steps": [1, 2] })), Ok(()));
        assert_eq!(path(json!({ "ref": "main", "steps": [1, "2"] })), Err("/steps/1".to_owned()));
        assert_eq!(path(json!({ "ref": 7 })), Err("/ref".to_owned()));
        assert_eq!(path(json!({})), Err(String::new()));
        assert_eq!(check(&json!({}), &json!(7)), Ok(()));
    }

    #[test]
    fn a_schema_that_reaches_outside_or_is_none_is_refused() {
        assert!(compile(&json!({ "$ref": "https://example.org/schema.json" })).is_err());
        assert!(compile(&json!({ "type": "strin" })).is_err());
        assert!(compile(&json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "string" } } })).is_ok());
    }
}
