//! Patterns of triggers: compiled once, and matched at a bounded cost.
//!
//! Tenants write them, so they are matched on the blocking pool: for one family of workspaces at a time and for a short
//! turn, after which others have theirs. A message whose patterns take too long is matched against the first of them
//! only.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use moka::sync::Cache;
use regex::RegexBuilder;
use relay_domain::{
    actions::trigger::{MAX_COMPILED_BYTES, MAX_MATCHED_BYTES},
    workspaces::family::FamilyId,
};
use tokio::time::Instant;

use super::pattern_cost::PatternCost;
use crate::{EngineError, EngineResult, fair_permits::FairPermits};

/// States of a pattern that is matched against [`MAX_MATCHED_BYTES`]; one with more, against a shorter beginning of the
/// text. A step, the visit of one state for one byte, takes some 20 ns.
const FULL_STATES: u64 = 128;
const MAX_STEPS: u64 = FULL_STATES * MAX_MATCHED_BYTES as u64;
/// Time of one turn, after which the permit goes to another family. The last pattern may exceed it.
const TURN: Duration = Duration::from_millis(50);
/// Time of all patterns on one message; 500 patterns of people take a tenth of it for the longest text.
const MESSAGE_TIME: Duration = Duration::from_millis(500);
/// Longest wait for a permit.
const PERMIT_WAIT: Duration = Duration::from_secs(2);
/// Bound of the compiled patterns, in bytes.
const CACHED_BYTES: u64 = 32 * 1024 * 1024;
/// Bound of the states that a pattern keeps while it matches, in bytes. There is one set for each permit.
const AUTOMATON_BYTES: usize = 128 * 1024;

/// Estimate of the size of a pattern with at most [`FULL_STATES`], in bytes.
const SIMPLE_BYTES: usize = 48 * 1024;

type PatternCache = Cache<String, Arc<TriggerPattern>>;

/// Compiled pattern of a trigger.
#[derive(Debug)]
pub(super) enum TriggerPattern {
    Expression {
        expression: Box<regex::Regex>,
        /// Beginning of a text against which it is matched, in bytes.
        matched_bytes: usize,
        /// Estimate of its size, in bytes.
        size: usize,
    },
    /// Text that is no regular expression: it is matched literally.
    Plain(String),
}

impl TriggerPattern {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// When it takes more memory than it may.
    pub(super) fn compile(pattern: &str) -> EngineResult<Self> {
        let built = RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).dfa_size_limit(AUTOMATON_BYTES).build();
        match built {
            Ok(expression) => {
                // One that cannot be measured counts as the costliest.
                let cost = PatternCost::measure(pattern, FULL_STATES).unwrap_or(PatternCost::States(MAX_STEPS));
                let affordable = usize::try_from(cost.bytes_within(MAX_STEPS)).unwrap_or(usize::MAX);
                let size = match cost {
                    PatternCost::States(states) if states <= FULL_STATES => SIMPLE_BYTES,
                    PatternCost::States(_) | PatternCost::Small => MAX_COMPILED_BYTES + AUTOMATON_BYTES,
                };
                let matched_bytes = affordable.min(MAX_MATCHED_BYTES);
                Ok(Self::Expression { expression: Box::new(expression), matched_bytes, size })
            }
            Err(regex::Error::CompiledTooBig(_)) => {
                Err(EngineError::invalid_request("pattern repeats itself too often"))
            }
            Err(_) => Ok(Self::Plain(pattern.to_owned())),
        }
    }

    /// Returns whether the beginning of a text matches.
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Expression { expression, matched_bytes, .. } => {
                expression.is_match(&text[..text.floor_char_boundary(*matched_bytes)])
            }
            Self::Plain(plain) => text[..text.floor_char_boundary(MAX_MATCHED_BYTES)].contains(plain.as_str()),
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Expression { size, .. } => *size,
            Self::Plain(plain) => plain.len(),
        }
    }
}

/// Compiled patterns by their text, and the permits for matching.
#[derive(Clone)]
pub(crate) struct TriggerPatterns {
    compiled: PatternCache,
    /// Half of the cores, and at least two, so that one family leaves a permit.
    permits: FairPermits,
}

impl Default for TriggerPatterns {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            compiled: Cache::builder()
                .max_capacity(CACHED_BYTES)
                .weigher(|text: &String, pattern: &Arc<TriggerPattern>| {
                    u32::try_from(pattern.size() + text.len()).unwrap_or(u32::MAX)
                })
                .build(),
            permits: FairPermits::new((cores / 2).max(2)),
        }
    }
}

impl TriggerPatterns {
    /// Matches a text against patterns. The result has an entry for each of the first patterns, all of them unless
    /// they take too long. `None` if there was no permit: to be tried again.
    pub(super) async fn match_all(&self, family: FamilyId, patterns: Vec<String>, text: &str) -> Option<Vec<bool>> {
        let text: Arc<str> = text[..text.floor_char_boundary(MAX_MATCHED_BYTES)].into();
        let patterns: Arc<[String]> = patterns.into();
        let mut matched = Vec::with_capacity(patterns.len());
        let mut left = MESSAGE_TIME;
        while matched.len() < patterns.len() && !left.is_zero() {
            let permit = self.permits.acquire(family, PERMIT_WAIT).await?;
            let (compiled, patterns, text) = (self.compiled.clone(), Arc::clone(&patterns), Arc::clone(&text));
            let turn = move || {
                let began = Instant::now();
                while let Some(pattern) = patterns.get(matched.len())
                    && began.elapsed() < TURN.min(left)
                {
                    matched.push(compile_cached(&compiled, pattern).matches(&text));
                }
                drop(permit);
                (matched, left.saturating_sub(began.elapsed()))
            };
            // An error is a panic of the matcher, or the end of the process.
            (matched, left) = tokio::task::spawn_blocking(turn).await.ok()?;
        }
        Some(matched)
    }
}

fn compile_cached(compiled: &PatternCache, pattern: &String) -> Arc<TriggerPattern> {
    if let Some(known) = compiled.get(pattern) {
        return known;
    }
    // Stored patterns were compiled before; one that no longer compiles is matched literally.
    let new = TriggerPattern::compile(pattern).unwrap_or_else(|_| TriggerPattern::Plain(pattern.clone()));
    let new = Arc::new(new);
    compiled.insert(pattern.clone(), Arc::clone(&new));
    new
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[test]
    fn invalid_expressions_match_literally() {
        for (pattern, text, expected) in [
            ("^deploy\\b", "deploy it", true),
            ("^deploy\\b", "please deploy it", false),
            ("deploy", "please deploy it", true),
            ("(?i)DEPLOY", "please deploy it", true),
            ("what?(", "so what?(", true),
            ("what?(", "what", false),
            ("a.c", "abc", true),
        ] {
            assert_eq!(TriggerPattern::compile(pattern).unwrap().matches(text), expected, "{pattern} in {text}");
        }
    }

    #[test]
    fn a_pattern_is_matched_against_as_much_text_as_it_can_afford() {
        let matched_bytes = |pattern: &str| match TriggerPattern::compile(pattern).unwrap() {
            TriggerPattern::Expression { matched_bytes, .. } => matched_bytes,
            TriggerPattern::Plain(_) => panic!("{pattern} is an expression"),
        };
        assert_eq!(matched_bytes("deploy"), MAX_MATCHED_BYTES);
        assert_eq!(matched_bytes(r"\b(deploy|release)\b\s+\w+"), MAX_MATCHED_BYTES);
        assert!((500..2000).contains(&matched_bytes("[ab]*a[ab]{3500}c")));
        let long = format!("{}é deploy", "x".repeat(MAX_MATCHED_BYTES - 1));
        assert!(!TriggerPattern::compile("deploy").unwrap().matches(&long));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn costly_patterns_leave_the_rest_unmatched() {
        let patterns = TriggerPatterns::default();
        let family = FamilyId::of_workspace(WorkspaceId::new(1), None);
        let text = "ab".repeat(MAX_MATCHED_BYTES / 2);
        let mut costly: Vec<String> = (0..500).map(|n| format!("[ab]*a[ab]{{{}}}c", 3000 + n)).collect();
        costly[0] = "ab".to_owned();
        let matched = patterns.match_all(family, costly, &text).await.unwrap();
        assert!(matched[0] && !matched[1..].contains(&true));
        assert!(matched.len() < 500, "{} patterns were matched", matched.len());
        let cheap = (0..10).map(|n| format!("b{n}?a")).collect();
        assert_eq!(patterns.match_all(family, cheap, &text).await.unwrap(), vec![true; 10]);
    }
}
