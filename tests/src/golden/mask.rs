//! Placeholders for values that differ between runs: IDs, tokens, instants, addresses, measured durations.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// Values that are equal get equal placeholders; instants keep their form.
///
/// The order of the alternatives matters: of those that match at one place the first counts.
static VARYING: LazyLock<Regex> = LazyLock::new(|| {
    let kinds = [
        r"(?P<live>\b[a-z]{2}_live_[\w.-]+)",
        r"(?P<jwt>\beyJ[\w-]+\.[\w-]+\.[\w-]+)",
        r"(?P<file>\bown\d\.[\w-]+\.[\w-]+)",
        r"(?P<signature>\bv1,[A-Za-z0-9+/]+=*)",
        r"(?P<trace>\b00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\b)",
        r"(?P<uuid>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})",
        r"(?P<time>\b\d{4}-\d{2}-\d{2}(?:(?:T|%20| )\d{2}(?::|%3A)\d{2}(?::|%3A)\d{2}(?:\.\d+)?(?:Z|(?:\+|-)\d{2}:?\d{2})?)?)",
        r"(?P<hex>[0-9a-f]{24,})",
        r"(?P<short>\b[0-9a-f]{16}\b)",
        r"(?P<host>\b(?:127\.0\.0\.1|localhost):\d+)",
        // A measured number is recognized by its key.
        r#"(?P<key>"(?:\w*_ms|\w*_seconds|\w*_age|uptime\w*|pid)":)(?P<measured>-?\d+(?:\.\d+)?)"#,
        r"(?P<header>\b(?:retry-after|x-ratelimit-remaining): )\d+",
        // Usage is final once a worker has come past it.
        r#"(?P<final>"final_until":)(?:null|"[^"]*")"#,
        // The wording of a refusal is free.
        r#"(?P<code>"code":"[a-z_]+","message":)"(?:[^"\\]|\\.)*""#,
        r"(?P<id>\d{15,20})",
        r"(?P<unix>\b1[7-9]\d{8}(?:\d{3})?\b)",
    ];
    Regex::new(&kinds.join("|")).expect("a regular expression")
});

/// The numbers that values were given, in order of their first appearance.
#[derive(Debug, Default)]
pub struct Names {
    known: HashMap<String, String>,
    counts: HashMap<String, usize>,
    /// Set when further values get no number of their own.
    complete: bool,
}

impl Names {
    /// From now on values that were not seen before are masked without a number: their order is not known.
    pub fn complete(&mut self) {
        self.complete = true;
    }

    /// The text with placeholders.
    pub fn mask<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        VARYING.replace_all(text, |found: &Captures<'_>| self.placeholder(found))
    }

    fn placeholder(&mut self, found: &Captures<'_>) -> String {
        let whole = &found[0];
        if let Some(key) = found.name("key") {
            let point = found["measured"].contains('.');
            return format!("{}{}", key.as_str(), if point { "0.0" } else { "0" });
        }
        if let Some(header) = found.name("header") {
            return format!("{}0", header.as_str());
        }
        if let Some(key) = found.name("final") {
            return format!("{}<time or null>", key.as_str());
        }
        if let Some(code) = found.name("code") {
            return format!("{}\"…\"", code.as_str());
        }
        if found.name("time").is_some() {
            let zeroed: String = whole.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
            // A client's nanoseconds end with three zeros now and then, which its formatter leaves out.
            return MICROSECONDS.replace(&zeroed, ".000000000$1").into_owned();
        }
        for kind in ["jwt", "file", "signature", "trace", "host", "unix"] {
            if found.name(kind).is_some() {
                return format!("<{kind}>");
            }
        }
        if found.name("live").is_some() {
            return self.named(&whole[..7], whole);
        }
        let hex = format!("hex{}", whole.len());
        let kind = ["uuid", "id"].into_iter().find(|kind| found.name(kind).is_some()).unwrap_or(&hex);
        self.named(kind, whole)
    }

    fn named(&mut self, kind: &str, value: &str) -> String {
        if let Some(name) = self.known.get(value) {
            return name.clone();
        }
        if self.complete {
            return format!("<{kind}>");
        }
        let count = self.counts.entry(kind.to_owned()).or_default();
        *count += 1;
        let name = format!("<{kind} {count}>");
        self.known.insert(value.to_owned(), name.clone());
        name
    }
}

/// Fraction of a masked time with six digits, and what follows it.
static MICROSECONDS: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\.000000([^0].*)?$").expect("a regular expression"));

/// A value that is nothing but varying parts, such as `del_<id>_<id>`.
static ONLY_VARYING: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^(?:[a-z_-]*<(?:id|uuid|hex\d+|[a-z]{2}_live|jwt)>)+$|^0000-[0-9T:.Z+-]+$")
        .expect("a regular expression")
});

/// The value with placeholders, if nothing else is in it.
pub(super) fn kind_of(value: &str) -> Option<String> {
    let masked = Names { complete: true, ..Names::default() }.mask(value).into_owned();
    ONLY_VARYING.is_match(&masked).then_some(masked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_get_equal_placeholders() {
        let mut names = Names::default();
        let text = r#"{"id":"del_224466881188992200_224466881188992201","agent_id":"224466881188992201"}"#;
        assert_eq!(names.mask(text), r#"{"id":"del_<id 1>_<id 2>","agent_id":"<id 2>"}"#);
        names.complete();
        assert_eq!(names.mask("224466881188992200 224466881188992299"), "<id 1> <id>");
    }

    #[test]
    fn forms_are_kept_and_values_are_not() {
        let masked = |text: &str| Names::default().mask(text).into_owned();
        assert_eq!(masked("2026-03-01T12:00:00.123Z"), "0000-00-00T00:00:00.000Z");
        for time in ["2026-03-01T12:00:00.123456789+00:00", "2026-03-01T12:00:00.123456+00:00"] {
            assert_eq!(masked(time), "0000-00-00T00:00:00.000000000+00:00");
        }
        assert_eq!(
            masked(r#"{"code":"not_found","message":"no \"x\"","a":1}"#),
            r#"{"code":"not_found","message":"…","a":1}"#
        );
        assert_eq!(masked(r#"{"latency_ms":12,"seq":12}"#), r#"{"latency_ms":0,"seq":12}"#);
        assert_eq!(masked("at_live_00ff"), "<at_live 1>");
        assert_eq!(masked("dm_0123456789abcdef01234567"), "dm_<hex24 1>");
        assert_eq!(masked("http://127.0.0.1:80/x"), "http://<host>/x");
    }
}
