//! [`ResultSchema`]: the shape that an agent's structured result must have.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// It is handed to the agent in a variable of its environment, which the system bounds by 128 KiB.
const MAX_BYTES: usize = 64 << 10;
/// Compiled size of one pattern.
const PATTERN_BYTES: usize = 1 << 20;

/// A compiled JSON schema. Patterns are matched in linear time; references to other documents are refused.
#[derive(Debug)]
pub(crate) struct ResultSchema {
    validator: Validator,
}

impl ResultSchema {
    /// Compiles a schema.
    ///
    /// # Errors
    /// A text for the caller, if it is no valid schema.
    pub(crate) fn compile(schema: &Value) -> Result<Self, String> {
        if !schema.is_object() && !schema.is_boolean() {
            return Err("agentResultSchema must be an object or a boolean".to_owned());
        }
        if schema.to_string().len() > MAX_BYTES {
            return Err("agentResultSchema is above 64 KiB".to_owned());
        }
        let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES);
        let built = jsonschema::options().with_pattern_options(patterns).build(schema);
        let validator = built.map_err(|error| format!("agentResultSchema is no valid JSON schema: {error}"))?;
        Ok(Self { validator })
    }

    /// Checks a result.
    ///
    /// # Errors
    /// A text that names the place and the fault.
    pub(crate) fn check(&self, data: &Value) -> Result<(), String> {
        self.validator.validate(data).map_err(|error| {
            let place = error.instance_path().to_string();
            let place = if place.is_empty() { "data".to_owned() } else { format!("data{place}") };
            format!("{place}: {error}")
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_is_checked_and_the_fault_named() {
        let schema =
            json!({ "type": "object", "properties": { "score": { "type": "number" } }, "required": ["score"] });
        let schema = ResultSchema::compile(&schema).expect("a schema");
        assert_eq!(schema.check(&json!({ "score": 1.5 })), Ok(()));
        let fault = schema.check(&json!({ "score": "high" })).expect_err("a fault");
        assert!(fault.starts_with("data/score: "), "{fault}");
        assert!(ResultSchema::compile(&json!(true)).is_ok());
    }

    #[test]
    fn an_invalid_schema_is_refused() {
        for wrong in [json!("text"), json!({ "type": 5 }), json!({ "$ref": "http://127.0.0.1/x" })] {
            assert!(ResultSchema::compile(&wrong).is_err(), "{wrong}");
        }
        assert!(ResultSchema::compile(&json!({ "description": "x".repeat(MAX_BYTES) })).is_err());
    }
}
