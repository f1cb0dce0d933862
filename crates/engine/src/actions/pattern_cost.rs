//! [`PatternCost`]: bound of the work of matching a pattern that a tenant wrote, known before it is applied.
//!
//! The matcher takes time linear in the text, but the factor is the tenant's choice: `[ab]*a[ab]{3500}c` visits 3500
//! states for each byte. Schemas and triggers limit the product.

use regex_automata::{
    MatchKind,
    dfa::{StartKind, dense},
    nfa::thompson,
};
use regex_syntax::hir::{Class, Hir, HirKind};

/// Bound of the memory of a small automaton, in bytes: half of what a matcher caches of it.
const SMALL_BYTES: usize = 64 * 1024;
/// Bytes of text that cost a step with a small automaton: it visits one state for each.
const BYTES_PER_STEP: u64 = 16;
/// Positions that a character outside of ASCII counts as: its bytes are matched one by one.
const WIDE_POSITIONS: u64 = 4;

/// Cost of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PatternCost {
    /// The matcher caches the whole automaton of the pattern.
    Small,
    /// States that the matcher may visit for each byte.
    States(u64),
}

impl PatternCost {
    /// Measures a pattern in the syntax of the `regex` crate; `None` if it is not valid there. Up to `few` states, it
    /// does not matter whether the pattern is [`PatternCost::Small`], which takes longest to find out.
    pub(super) fn measure(pattern: &str, few: u64) -> Option<Self> {
        let states = positions(&regex_syntax::parse(pattern).ok()?);
        Some(if states > few && is_small(pattern) { Self::Small } else { Self::States(states) })
    }

    /// Returns the bytes of text that take at most `steps`, each the visit of one state.
    pub(super) const fn bytes_within(self, steps: u64) -> u64 {
        match self {
            Self::Small => steps.saturating_mul(BYTES_PER_STEP),
            Self::States(0) => steps,
            Self::States(states) => steps / states,
        }
    }
}

/// Returns whether the automata for both directions of matching fit into the matcher's cache. Patterns with Unicode
/// word boundaries do not: on text outside of ASCII, the matcher does without automata.
fn is_small(pattern: &str) -> bool {
    let config = dense::Config::new()
        .dfa_size_limit(Some(SMALL_BYTES))
        .determinize_size_limit(Some(SMALL_BYTES))
        .prefilter(None)
        .accelerate(false);
    let forward = dense::Builder::new().configure(config.clone().start_kind(StartKind::Both)).build(pattern);
    forward.is_ok()
        && dense::Builder::new()
            .configure(config.match_kind(MatchKind::All).start_kind(StartKind::Anchored))
            .thompson(thompson::Config::new().reverse(true))
            .build(pattern)
            .is_ok()
}

/// Counts the places of a pattern at which a match may be at the same time, with repetitions written out.
fn positions(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 1,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Class(Class::Bytes(_)) => 1,
        HirKind::Class(Class::Unicode(class)) if class.is_ascii() => 1,
        HirKind::Class(Class::Unicode(_)) => WIDE_POSITIONS,
        HirKind::Repetition(repetition) => {
            // An open repetition is compiled as its least number of copies and a loop.
            let times = repetition.max.unwrap_or_else(|| repetition.min.saturating_add(1));
            positions(&repetition.sub).saturating_add(1).saturating_mul(u64::from(times))
        }
        HirKind::Capture(capture) => positions(&capture.sub).saturating_add(1),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().fold(1, |sum, part| u64::saturating_add(sum, positions(part)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_people_cost_little() {
        for pattern in ["deploy", "^[a-z]{1,40}$", "^[0-9]{4}-[0-9]{2}$", "(?i)(hello|world)", "^[A-Za-z0-9+/]*={0,2}$"]
        {
            assert_eq!(PatternCost::measure(pattern, 0), Some(PatternCost::Small), "{pattern}");
        }
        let PatternCost::States(states) = PatternCost::measure(r"\b(deploy|release)\b\s+\w+", 0).unwrap() else {
            panic!("word boundaries need the slower matcher");
        };
        assert!(states < 40, "{states}");
    }

    #[test]
    fn repetitions_are_written_out() {
        for (pattern, least) in [
            ("[ab]*a[ab]{1600}c", 1600),
            ("(?:(?:[ab]?){40}){40}", 1600),
            (r"\w*a\w{200}c", 800),
            ("(?:a|b|[ab]{300}){2}[ab]*a[ab]{900}", 1500),
        ] {
            let PatternCost::States(states) = PatternCost::measure(pattern, 0).unwrap() else { panic!("{pattern}") };
            assert!((least..10_000).contains(&states), "{pattern}: {states}");
        }
        assert_eq!(PatternCost::measure("(", 0), None);
    }
}
