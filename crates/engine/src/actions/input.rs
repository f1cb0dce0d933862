//! Validation of inputs against the schemas of their actions.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// Bound of an error message, in characters.
const MAX_MESSAGE_CHARS: usize = 300;

/// First violation of a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputProblem {
    /// JSON pointer into the input; empty for all of it.
    pub(super) path: String,
    /// Text for people.
    pub(super) message: String,
}

/// Compiles a schema. Patterns are matched in linear time; references outside of the schema are refused.
pub(super) fn compile_schema(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::regex())
        .build(schema)
        .map_err(|error| truncate_message(&error.to_string()))
}

/// Validates an input; returns the first violation.
pub(super) fn check_input(schema: &Value, input: &Value) -> Result<(), InputProblem> {
    if schema.as_object().is_none_or(serde_json::Map::is_empty) {
        return Ok(());
    }
    // It compiled when it was stored; a schema that no longer does requires nothing.
    let Ok(validator) = compile_schema(schema) else { return Ok(()) };
    validator.validate(input).map_err(|error| InputProblem {
        path: error.instance_path().to_string(),
        message: truncate_message(&error.to_string()),
    })
}

/// Bounds a message: it quotes the input, which may be long.
fn truncate_message(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE_CHARS) {
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
        let path = |input: Value| check_input(&schema, &input).map_err(|problem| problem.path);
        assert_eq!(path(json!({ "ref": "main", "steps": [1, 2] })), Ok(()));
        assert_eq!(path(json!({ "ref": "main", "steps": [1, "2"] })), Err("/steps/1".to_owned()));
        assert_eq!(path(json!({ "ref": 7 })), Err("/ref".to_owned()));
        assert_eq!(path(json!({})), Err(String::new()));
        assert_eq!(check_input(&json!({}), &json!(7)), Ok(()));
    }

    #[test]
    fn external_references_and_invalid_schemas_are_refused() {
        assert!(compile_schema(&json!({ "$ref": "https://example.org/schema.json" })).is_err());
        assert!(compile_schema(&json!({ "type": "strin" })).is_err());
        assert!(compile_schema(&json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "string" } } })).is_ok());
    }
}
