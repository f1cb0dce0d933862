//! Cost of JSON schemas, known before they are compiled or applied.
//!
//! A schema is written by a tenant, and validators do not bound their work: references multiply it (a chain of `allOf`
//! with two references each doubles at every step), and patterns compile to far more than their text. [`weigh`] bounds
//! a schema by itself, [`cost_of_check`] its application to one input. Both count an upper bound of what a validator
//! may visit, and stop at their limit.

mod check;

use std::collections::HashMap;

use check::Check;
use serde_json::{Map, Value};

/// Maximum weight of a schema: subschemas and keyword entries, each counted as often as references reach it. Compiling
/// so many takes some tens of milliseconds; schemas written by people have hundreds.
pub const MAX_WEIGHT: u64 = 20_000;
/// Maximum number of patterns in a schema.
pub const MAX_PATTERNS: usize = 64;
/// Maximum length of a pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 1024;
/// Maximum cost of one check, in steps of a validator. A million take about a tenth of a second.
pub const MAX_CHECK_COST: u64 = 1_000_000;
/// Maximum nesting of one check; deeper means that references lead back without progress.
const MAX_DEPTH: usize = 256;

/// Reason for which a schema is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaProblem {
    /// References multiply its subschemas, or it has too many.
    #[error("the schema has more than {MAX_WEIGHT} parts, counting each as often as references reach it")]
    TooLarge,
    /// References lead back to themselves.
    #[error("the schema's references lead back to themselves, or are nested too deeply")]
    TooDeep,
    #[error("the schema has more than {MAX_PATTERNS} patterns")]
    TooManyPatterns,
    #[error("a pattern of the schema has more than {MAX_PATTERN_BYTES} bytes")]
    PatternTooLong,
    /// A pattern compiles to too much.
    #[error("a pattern of the schema compiles to more than a check may keep")]
    PatternTooLarge,
    /// A reference that leads out of the schema, or nowhere.
    #[error("the schema has no part {0:?} that a reference names")]
    UnknownReference(String),
    /// One input would take too long to check.
    #[error("the schema needs too many steps for this input")]
    CheckTooExpensive,
}

/// Checks the weight of a schema and of its patterns.
///
/// # Errors
/// When it exceeds a bound, or a reference cannot be followed.
pub fn weigh(schema: &Value) -> Result<(), SchemaProblem> {
    check_patterns(schema)?;
    let references = References::new(schema);
    let weight = Weigher { references, known: HashMap::new() }.weigh(schema, 0)?;
    if weight > MAX_WEIGHT { Err(SchemaProblem::TooLarge) } else { Ok(()) }
}

/// Checks the cost of applying a schema to an input.
///
/// # Errors
/// When it exceeds [`MAX_CHECK_COST`], or a reference cannot be followed.
pub fn cost_of_check(schema: &Value, input: &Value, patterns: &PatternStates) -> Result<(), SchemaProblem> {
    Check::new(schema, patterns).visit(schema, input, 0)
}

/// States that the matcher may visit for each byte, by pattern. Zero: it looks at each byte once.
pub type PatternStates = HashMap<String, u64>;

/// Targets of references within a schema.
struct References<'a> {
    root: &'a Value,
    /// Identifier of the whole schema, which references may repeat.
    id: &'a str,
    anchors: HashMap<&'a str, &'a Value>,
}

impl<'a> References<'a> {
    fn new(root: &'a Value) -> Self {
        let id = root["$id"].as_str().unwrap_or_default();
        let mut anchors = HashMap::new();
        collect_anchors(root, &mut anchors);
        Self { root, id: id.split('#').next().unwrap_or_default(), anchors }
    }

    fn resolve(&self, reference: &str) -> Result<&'a Value, SchemaProblem> {
        let unknown = || SchemaProblem::UnknownReference(reference.to_owned());
        let (base, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        if !base.is_empty() && base != self.id {
            return Err(unknown());
        }
        if fragment.is_empty() {
            return Ok(self.root);
        }
        let fragment = decode_percent(fragment);
        if fragment.starts_with('/') {
            return self.root.pointer(&fragment).ok_or_else(unknown);
        }
        self.anchors.get(fragment.as_str()).copied().ok_or_else(unknown)
    }
}

fn collect_anchors<'a>(schema: &'a Value, anchors: &mut HashMap<&'a str, &'a Value>) {
    match schema {
        Value::Object(map) => {
            for keyword in ["$anchor", "$dynamicAnchor"] {
                if let Some(name) = map.get(keyword).and_then(Value::as_str) {
                    anchors.insert(name, schema);
                }
            }
            // Older drafts write an anchor as an identifier.
            if let Some(name) = map.get("$id").and_then(Value::as_str).and_then(|id| id.strip_prefix('#')) {
                anchors.insert(name, schema);
            }
            // The recursion is bounded: JSON of clients nests `MAX_JSON_DEPTH` levels at most.
            map.values().for_each(|part| collect_anchors(part, anchors));
        }
        Value::Array(parts) => parts.iter().for_each(|part| collect_anchors(part, anchors)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Decodes `%41` in a fragment.
fn decode_percent(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let mut decoded = [0];
        match tail.split_at_checked(2) {
            Some((hex, behind)) if *first == b'%' && hex::decode_to_slice(hex, &mut decoded).is_ok() => {
                bytes.push(decoded[0]);
                rest = behind;
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    // A text that is not UTF-8 names no part, whatever replaces its bytes.
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Checks number and length of all patterns, wherever they stand.
fn check_patterns(schema: &Value) -> Result<(), SchemaProblem> {
    let patterns = patterns(schema);
    if patterns.len() > MAX_PATTERNS {
        return Err(SchemaProblem::TooManyPatterns);
    }
    if patterns.iter().any(|pattern| pattern.len() > MAX_PATTERN_BYTES) {
        return Err(SchemaProblem::PatternTooLong);
    }
    Ok(())
}

/// Returns all patterns of a schema.
#[must_use]
pub fn patterns(schema: &Value) -> Vec<&str> {
    let mut patterns = Vec::new();
    collect_patterns(schema, &mut patterns);
    patterns
}

fn collect_patterns<'a>(schema: &'a Value, patterns: &mut Vec<&'a str>) {
    match schema {
        Value::Object(map) => {
            patterns.extend(map.get("pattern").and_then(Value::as_str));
            if let Some(Value::Object(by_pattern)) = map.get("patternProperties") {
                patterns.extend(by_pattern.keys().map(String::as_str));
            }
            map.values().for_each(|part| collect_patterns(part, patterns));
        }
        Value::Array(parts) => parts.iter().for_each(|part| collect_patterns(part, patterns)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Subschemas of a keyword.
enum Keyword<'a> {
    /// Leads to another part of the schema.
    Reference(&'a str),
    /// Applied to the same value.
    InPlace(Vec<&'a Value>),
    /// Applied to parts of the value.
    Children(Children<'a>),
    /// Without subschemas.
    Plain,
}

/// Subschemas for parts of a value.
enum Children<'a> {
    /// By the name of a property.
    Named(&'a Map<String, Value>),
    /// By the position of an element.
    Positions(&'a [Value]),
    /// Each for any element and any property.
    Any(Vec<&'a Value>),
    /// For the names of properties.
    Names(&'a Value),
}

fn keyword<'a>(name: &str, value: &'a Value) -> Keyword<'a> {
    match (name, value) {
        ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(reference)) => Keyword::Reference(reference),
        ("allOf" | "anyOf" | "oneOf", Value::Array(parts)) => Keyword::InPlace(parts.iter().collect()),
        ("not" | "if" | "then" | "else", part) => Keyword::InPlace(vec![part]),
        // In older drafts an array stands there too; it only names required properties.
        ("dependentSchemas" | "dependencies", Value::Object(parts)) => {
            Keyword::InPlace(parts.values().filter(|part| part.is_object()).collect())
        }
        ("properties", Value::Object(parts)) => Keyword::Children(Children::Named(parts)),
        ("patternProperties", Value::Object(parts)) => Keyword::Children(Children::Any(parts.values().collect())),
        ("prefixItems" | "items", Value::Array(parts)) => Keyword::Children(Children::Positions(parts)),
        ("propertyNames", part) => Keyword::Children(Children::Names(part)),
        (
            "items"
            | "additionalItems"
            | "unevaluatedItems"
            | "contains"
            | "additionalProperties"
            | "unevaluatedProperties",
            part,
        ) => Keyword::Children(Children::Any(vec![part])),
        _ => Keyword::Plain,
    }
}

/// Entries of a keyword's value, each of which may cost a step.
fn entries(value: &Value) -> u64 {
    match value {
        Value::Array(parts) => parts.len() as u64,
        Value::Object(parts) => parts.len() as u64,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

struct Weigher<'a> {
    references: References<'a>,
    /// Weights of referenced parts; `None` while one is being weighed.
    known: HashMap<*const Value, Option<u64>>,
}

impl<'a> Weigher<'a> {
    fn weigh(&mut self, schema: &'a Value, depth: usize) -> Result<u64, SchemaProblem> {
        let Value::Object(map) = schema else { return Ok(1) };
        if depth > MAX_DEPTH {
            return Err(SchemaProblem::TooDeep);
        }
        let mut weight: u64 = 1;
        for (name, value) in map {
            let part = match keyword(name, value) {
                Keyword::Reference(reference) => self.weigh_target(reference, depth)?,
                Keyword::InPlace(parts) => self.weigh_all(parts, depth)?,
                Keyword::Children(Children::Named(parts)) => self.weigh_all(parts.values().collect(), depth)?,
                Keyword::Children(Children::Positions(parts)) => self.weigh_all(parts.iter().collect(), depth)?,
                Keyword::Children(Children::Any(parts)) => self.weigh_all(parts, depth)?,
                Keyword::Children(Children::Names(part)) => self.weigh(part, depth + 1)?,
                // Read only where a reference leads to it.
                Keyword::Plain if name == "$defs" || name == "definitions" => 0,
                Keyword::Plain => entries(value),
            };
            weight = weight.saturating_add(part);
        }
        Ok(weight)
    }

    fn weigh_all(&mut self, parts: Vec<&'a Value>, depth: usize) -> Result<u64, SchemaProblem> {
        parts.into_iter().try_fold(0_u64, |sum, part| Ok(sum.saturating_add(self.weigh(part, depth + 1)?)))
    }

    fn weigh_target(&mut self, reference: &str, depth: usize) -> Result<u64, SchemaProblem> {
        let target = self.references.resolve(reference)?;
        // By address: a part is weighed once and counted for each reference, so that references multiply the weight but
        // not the time to find it.
        let key = std::ptr::from_ref(target);
        match self.known.get(&key) {
            // A circle: how often it is run through depends on the input, and is counted there.
            Some(None) => return Ok(1),
            Some(Some(weight)) => return Ok(*weight),
            None => {}
        }
        self.known.insert(key, None);
        let weight = self.weigh(target, depth + 1)?;
        self.known.insert(key, Some(weight));
        Ok(weight)
    }
}

#[cfg(test)]
#[path = "schema_cost_tests.rs"]
mod tests;
