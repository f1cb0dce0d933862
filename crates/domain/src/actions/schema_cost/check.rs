//! Steps that a validator may take to apply a schema to one input.

use serde_json::{Map, Value};

use super::{Children, Keyword, MAX_CHECK_COST, MAX_DEPTH, PatternStates, References, SchemaProblem, entries, keyword};

/// Bytes of a string that cost one step.
const BYTES_PER_STEP: u64 = 16;
/// States of a pattern, each visited for one byte, that cost one step.
const STATES_PER_STEP: u64 = 4;

/// Walk through a schema with one input.
pub(super) struct Check<'a> {
    references: References<'a>,
    patterns: &'a PatternStates,
    left: u64,
}

impl<'a> Check<'a> {
    pub(super) fn new(schema: &'a Value, patterns: &'a PatternStates) -> Self {
        Self { references: References::new(schema), patterns, left: MAX_CHECK_COST }
    }

    fn spend(&mut self, steps: u64) -> Result<(), SchemaProblem> {
        self.left = self.left.checked_sub(steps).ok_or(SchemaProblem::CheckTooExpensive)?;
        Ok(())
    }

    pub(super) fn visit(&mut self, schema: &'a Value, input: &Value, depth: usize) -> Result<(), SchemaProblem> {
        self.spend(1)?;
        let Value::Object(map) = schema else { return Ok(()) };
        if depth > MAX_DEPTH {
            return Err(SchemaProblem::TooDeep);
        }
        // First, to know its cost: the `unevaluated` keywords below repeat it.
        let before = self.left;
        self.visit_in_place(map, input, depth + 1)?;
        let in_place = before - self.left;
        for (name, value) in map {
            match keyword(name, value) {
                Keyword::Reference(_) | Keyword::InPlace(_) => {}
                Keyword::Children(children) => {
                    // The keywords for the other properties match the patterns again.
                    if matches!(name.as_str(), "patternProperties" | "additionalProperties" | "unevaluatedProperties") {
                        self.spend_names(map.get("patternProperties"), input)?;
                    }
                    // To find the parts that are not evaluated, a validator repeats the subschemas of the same value
                    // for each part.
                    if name.starts_with("unevaluated") {
                        self.spend(entries(input).saturating_mul(in_place + entries(schema)))?;
                    }
                    self.visit_children(&children, input, depth + 1)?;
                }
                Keyword::Plain => self.spend_plain(name, value, input)?,
            }
        }
        Ok(())
    }

    /// Visits the subschemas that apply to the same value.
    fn visit_in_place(
        &mut self,
        map: &'a Map<String, Value>,
        input: &Value,
        depth: usize,
    ) -> Result<(), SchemaProblem> {
        for (name, value) in map {
            match keyword(name, value) {
                Keyword::Reference(reference) => self.visit(self.references.resolve(reference)?, input, depth)?,
                Keyword::InPlace(parts) => parts.into_iter().try_for_each(|part| self.visit(part, input, depth))?,
                Keyword::Children(_) | Keyword::Plain => {}
            }
        }
        Ok(())
    }

    fn visit_children(&mut self, children: &Children<'a>, input: &Value, depth: usize) -> Result<(), SchemaProblem> {
        match (children, input) {
            (Children::Named(parts), Value::Object(properties)) => {
                self.spend(parts.len() as u64)?;
                for (name, part) in *parts {
                    if let Some(property) = properties.get(name) {
                        self.visit(part, property, depth)?;
                    }
                }
            }
            (Children::Positions(parts), Value::Array(elements)) => {
                for (part, element) in parts.iter().zip(elements) {
                    self.visit(part, element, depth)?;
                }
            }
            (Children::Any(parts), Value::Array(elements)) => {
                for part in parts {
                    elements.iter().try_for_each(|element| self.visit(part, element, depth))?;
                }
            }
            (Children::Any(parts), Value::Object(properties)) => {
                for part in parts {
                    for (name, property) in properties {
                        self.spend(name.len() as u64 / BYTES_PER_STEP)?;
                        self.visit(part, property, depth)?;
                    }
                }
            }
            (Children::Names(part), Value::Object(properties)) => {
                for name in properties.keys() {
                    self.visit(part, &Value::from(name.as_str()), depth)?;
                }
            }
            // Keywords for arrays do not apply to objects, nor those for objects to arrays.
            _ => {}
        }
        Ok(())
    }

    /// Counts the matches of all patterns with the names of all properties.
    fn spend_names(&mut self, by_pattern: Option<&Value>, input: &Value) -> Result<(), SchemaProblem> {
        let (Some(Value::Object(by_pattern)), Value::Object(properties)) = (by_pattern, input) else { return Ok(()) };
        for pattern in by_pattern.keys() {
            properties.keys().try_for_each(|name| self.spend_match(pattern, name))?;
        }
        Ok(())
    }

    fn spend_match(&mut self, pattern: &str, text: &str) -> Result<(), SchemaProblem> {
        // A pattern that could not be measured costs more than any check may.
        let states = self.patterns.get(pattern).copied().unwrap_or(u64::MAX);
        let bytes = text.len() as u64;
        self.spend((1 + bytes / BYTES_PER_STEP).saturating_add(bytes.saturating_mul(states) / STATES_PER_STEP))
    }

    fn spend_plain(&mut self, name: &str, value: &Value, input: &Value) -> Result<(), SchemaProblem> {
        match (name, input) {
            ("$defs" | "definitions", _) => Ok(()),
            ("enum", _) => self.spend(entries(value).saturating_mul(1 + size_of_value(input) / BYTES_PER_STEP)),
            ("const" | "uniqueItems", _) => self.spend(size_of_value(input)),
            ("pattern", Value::String(text)) => {
                value.as_str().map_or(Ok(()), |pattern| self.spend_match(pattern, text))
            }
            // Lengths and formats are found by a walk through the whole text.
            (_, Value::String(text)) => self.spend(1 + text.len() as u64 / BYTES_PER_STEP),
            _ => self.spend(entries(value)),
        }
    }
}

/// Parts of a value, and steps to compare its strings.
fn size_of_value(value: &Value) -> u64 {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
        Value::String(text) => 1 + text.len() as u64 / BYTES_PER_STEP,
        Value::Array(parts) => 1 + parts.iter().map(size_of_value).sum::<u64>(),
        Value::Object(parts) => 1 + parts.values().map(size_of_value).sum::<u64>(),
    }
}
