//! Schemas of actions: checked when they are defined, compiled once, applied to inputs.
//!
//! Tenants write them, so their work is bounded (`relay_domain::actions::schema_cost`) and runs on a blocking pool:
//! one schema of a family of workspaces at a time, and only some of all families, so that a costly one delays only its
//! own.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use jsonschema::{PatternOptions, Validator};
use moka::sync::Cache;
use regex::RegexBuilder;
use relay_domain::{
    actions::schema_cost::{self, PatternStates, SchemaProblem},
    workspaces::family::FamilyId,
};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::pattern_cost::PatternCost;
use crate::{EngineError, EngineResult, error::InvalidInput, fair_permits::FairPermits};

/// Longest time of a check with its wait for a permit; beyond it the caller is asked to try again. The costliest check
/// takes about a tenth of it.
const DEADLINE: Duration = Duration::from_secs(2);
/// Bound of the compiled schemas, in bytes. What a schema takes is estimated.
const CACHED_BYTES: u64 = 64 * 1024 * 1024;
/// Estimate of the compiled size per byte of a schema's text: a keyword of some ten bytes compiles to a boxed validator
/// with its location, some two hundred.
const COMPILED_PER_BYTE: usize = 20;
/// Bound of one compiled pattern, and of the states that it builds while it matches, in bytes. `\p{L}{200}` takes
/// 4 MB; patterns for names, dates and addresses take some thousand bytes.
const PATTERN_BYTES: usize = 128 * 1024;
/// Bound of an error message, in characters.
const MAX_MESSAGE_CHARS: usize = 300;

type CompiledCache = Cache<[u8; 32], Arc<CompiledSchema>>;

/// Compiled schemas by the hash of their text, and the permits for the checks.
pub(crate) struct Schemas {
    compiled: CompiledCache,
    /// Half of the cores, so that requests always have some, but two at least: one family does not take all.
    permits: FairPermits,
}

impl Default for Schemas {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            compiled: Cache::builder()
                .max_capacity(CACHED_BYTES)
                .weigher(|_, compiled: &Arc<CompiledSchema>| compiled.bytes)
                .build(),
            permits: FairPermits::new((cores / 2).max(2)),
        }
    }
}

impl Schemas {
    /// Checks that a schema can be applied at a bounded cost. `field` is the field of the request that holds it.
    ///
    /// # Errors
    /// When it cannot, or is no schema.
    pub(super) async fn check_definition(
        &self,
        family: FamilyId,
        field: &'static str,
        schema: &Value,
    ) -> EngineResult<()> {
        if is_empty(schema) {
            return Ok(());
        }
        let schema = schema.clone();
        let checked = move |known: &CompiledCache| {
            let compiled = compile(known, &schema).map_err(|fault| match fault {
                SchemaFault::TooComplex(problem) => too_complex(&problem),
                SchemaFault::Invalid(problem) => {
                    EngineError::invalid_request(format!("{field} is no schema: {problem}"))
                }
            })?;
            // Finds references that lead back without progress.
            schema_cost::cost_of_check(&schema, &Value::Object(Map::new()), &compiled.patterns)
                .map_err(|problem| too_complex(&problem))
        };
        self.run(family, checked).await
    }

    /// Validates an input, and returns it.
    ///
    /// # Errors
    /// With the first violation, or when the check would cost too much.
    pub(super) async fn check_input(&self, family: FamilyId, schema: &Value, input: Value) -> EngineResult<Value> {
        // Without keywords there is nothing to check, so no permit and no thread is taken.
        if is_empty(schema) {
            return Ok(input);
        }
        let schema = schema.clone();
        let checked = move |known: &CompiledCache| {
            let compiled = compile(known, &schema).map_err(|fault| match fault {
                // An older version stored it without weighing it.
                SchemaFault::TooComplex(problem) => too_complex(&problem),
                // It compiled when it was defined, so a bound has been lowered since.
                SchemaFault::Invalid(problem) => EngineError::Invalid(InvalidInput::SchemaTooComplex(problem)),
            })?;
            schema_cost::cost_of_check(&schema, &input, &compiled.patterns).map_err(|problem| too_complex(&problem))?;
            check(&compiled, &input).map(|()| input)
        };
        self.run(family, checked).await
    }

    /// Runs work on the blocking pool, with a permit of the family and one of this process. Both are held until
    /// the work ends, also when its caller no longer waits.
    async fn run<T: Send + 'static>(
        &self,
        family: FamilyId,
        work: impl FnOnce(&CompiledCache) -> EngineResult<T> + Send + 'static,
    ) -> EngineResult<T> {
        let until = Instant::now() + DEADLINE;
        let permit = self.permits.acquire(family, DEADLINE).await.ok_or(EngineError::Overloaded)?;
        let compiled = self.compiled.clone();
        let work = move || {
            let done = work(&compiled);
            drop(permit);
            done
        };
        match tokio::time::timeout_at(until, tokio::task::spawn_blocking(work)).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) | Err(_) => Err(EngineError::Overloaded),
        }
    }
}

/// Validator of one schema, with its bounds.
struct CompiledSchema {
    validator: Validator,
    /// Costs of its patterns.
    patterns: PatternStates,
    /// Estimate of its size.
    bytes: u32,
}

/// Reason for which a schema cannot be applied.
enum SchemaFault {
    TooComplex(SchemaProblem),
    Invalid(String),
}

/// Weighs and compiles a schema, unless it is known. Patterns are matched in linear time; references outside of the
/// schema are refused.
fn compile(known: &CompiledCache, schema: &Value) -> Result<Arc<CompiledSchema>, SchemaFault> {
    let text = schema.to_string();
    let key = Sha256::digest(&text).into();
    if let Some(compiled) = known.get(&key) {
        return Ok(compiled);
    }
    // Before the schema is compiled, since its author determines what that costs.
    schema_cost::weigh(schema).and_then(|()| check_patterns(schema)).map_err(SchemaFault::TooComplex)?;
    let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES);
    let validator = jsonschema::options()
        .with_pattern_options(patterns)
        .build(schema)
        .map_err(|error| SchemaFault::Invalid(truncate_message(&error.to_string())))?;
    let bytes = text.len() * COMPILED_PER_BYTE + schema_cost::patterns(schema).len() * PATTERN_BYTES;
    let patterns = measure_patterns(schema);
    let compiled = Arc::new(CompiledSchema { validator, patterns, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) });
    known.insert(key, Arc::clone(&compiled));
    Ok(compiled)
}

/// Refuses patterns that compile to more than a validator may keep. Other faults are the compiler's to report.
fn check_patterns(schema: &Value) -> Result<(), SchemaProblem> {
    let is_too_large = |pattern: &&str| {
        let built = RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).build();
        matches!(built, Err(regex::Error::CompiledTooBig(_)))
    };
    match schema_cost::patterns(schema).iter().find(|pattern| is_too_large(pattern)) {
        Some(_) => Err(SchemaProblem::PatternTooLarge),
        None => Ok(()),
    }
}

/// Measures the patterns of a schema in the form that the validator compiles.
fn measure_patterns(schema: &Value) -> PatternStates {
    let measure = |pattern: &str| match PatternCost::measure(&jsonschema_regex::to_rust_regex(pattern).ok()?, 0)? {
        PatternCost::Small => Some(0),
        PatternCost::States(states) => Some(states),
    };
    let patterns = schema_cost::patterns(schema).into_iter();
    patterns.filter_map(|pattern| Some((pattern.to_owned(), measure(pattern)?))).collect()
}

fn check(compiled: &CompiledSchema, input: &Value) -> EngineResult<()> {
    compiled.validator.validate(input).map_err(|error| {
        EngineError::Invalid(InvalidInput::ActionInput {
            path: error.instance_path().to_string(),
            message: truncate_message(&error.to_string()),
        })
    })
}

fn is_empty(schema: &Value) -> bool {
    schema.as_object().is_none_or(Map::is_empty)
}

fn too_complex(problem: &SchemaProblem) -> EngineError {
    EngineError::Invalid(InvalidInput::SchemaTooComplex(problem.to_string()))
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
    use relay_domain::WorkspaceId;
    use serde_json::json;

    use super::*;

    fn family(workspace: i64) -> FamilyId {
        FamilyId::of_workspace(WorkspaceId::new(workspace), None)
    }

    #[tokio::test]
    async fn the_first_problem_names_its_path() {
        let schemas = Schemas::default();
        let schema = json!({
            "type": "object", "required": ["ref"],
            "properties": { "ref": { "type": "string" }, "steps": { "type": "array", "items": { "type": "integer" } } },
        });
        let path = async |input: Value| match schemas.check_input(family(1), &schema, input).await {
            Ok(_) => "fits".to_owned(),
            Err(EngineError::Invalid(InvalidInput::ActionInput { path, .. })) => path,
            Err(other) => panic!("{other:?}"),
        };
        assert_eq!(path(json!({ "ref": "main", "steps": [1, 2] })).await, "fits");
        assert_eq!(path(json!({ "ref": "main", "steps": [1, "2"] })).await, "/steps/1");
        assert_eq!(path(json!({ "ref": 7 })).await, "/ref");
        assert_eq!(path(json!({})).await, "");
        assert!(schemas.check_input(family(1), &json!({}), json!(7)).await.is_ok());
    }

    #[tokio::test]
    async fn schemas_that_cannot_be_applied_are_refused_when_they_are_defined() {
        let schemas = Schemas::default();
        let refusal = async |schema: Value| match schemas.check_definition(family(1), "input_schema", &schema).await {
            Ok(()) => "accepted",
            Err(EngineError::Invalid(InvalidInput::SchemaTooComplex(_))) => "too complex",
            Err(EngineError::Invalid(InvalidInput::Request(_))) => "invalid",
            Err(other) => panic!("{other:?}"),
        };
        let local = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "string" } } });
        assert_eq!(refusal(local).await, "accepted");
        assert_eq!(refusal(json!({ "$ref": "https://example.org/schema.json" })).await, "too complex");
        assert_eq!(refusal(json!({ "type": "strin" })).await, "invalid");
        assert_eq!(refusal(json!({ "pattern": "(" })).await, "invalid");
        assert_eq!(refusal(json!({ "pattern": "^[a-z]{1,40}$" })).await, "accepted");
        assert_eq!(refusal(json!({ "pattern": r"\p{L}{200}" })).await, "too complex");
        assert_eq!(refusal(json!({ "allOf": [{ "$ref": "#" }] })).await, "too complex");
    }

    #[tokio::test]
    async fn patterns_that_visit_many_states_are_refused_for_long_texts() {
        let schemas = Schemas::default();
        let check = async |pattern: &str, bytes: usize| {
            let schema = json!({ "pattern": pattern });
            match schemas.check_input(family(1), &schema, json!("ab".repeat(bytes / 2))).await {
                Ok(_) => "matches",
                Err(EngineError::Invalid(InvalidInput::SchemaTooComplex(_))) => "too complex",
                Err(EngineError::Invalid(InvalidInput::ActionInput { .. })) => "does not match",
                Err(other) => panic!("{other:?}"),
            }
        };
        let costly = "[ab]*a[ab]{1600}c";
        assert_eq!(check(costly, 1000).await, "does not match");
        assert_eq!(check(costly, 700_000).await, "too complex");
        for pattern in ["^[ab]*$", r"^[A-Za-z0-9+/]*={0,2}$", r"^\S*$"] {
            assert_eq!(check(pattern, 700_000).await, "matches", "{pattern}");
        }
    }
}
