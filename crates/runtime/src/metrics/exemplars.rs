//! A trace for each bucket of a histogram: from a slow request on a dashboard to what it did.
//!
//! The recorder knows nothing of them, so they are kept here and written into its page for whoever asks for
//! OpenMetrics, the only format that has a place for them.

use std::{
    collections::HashMap,
    fmt::Write as _,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use relay_domain::metric_names as name;

use super::SECONDS;

/// Routes that are told apart, which are as many as there are templates.
const ROUTES: usize = 512;

/// The media type that asks for OpenMetrics, and what is answered then.
pub(super) const OPENMETRICS: &str = "application/openmetrics-text";
pub(super) const OPENMETRICS_ANSWER: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone)]
struct Exemplar {
    trace: String,
    seconds: f64,
    at: f64,
}

/// By route, for each bucket the newest; the last bucket is the one without a bound.
type Kept = HashMap<String, Vec<Option<Exemplar>>>;

fn kept() -> MutexGuard<'static, Kept> {
    static KEPT: OnceLock<Mutex<Kept>> = OnceLock::new();
    KEPT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers the trace of a request that took so long.
pub fn note(route: &str, seconds: f64, trace: String) {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let bucket = SECONDS.iter().position(|bound| seconds <= *bound).unwrap_or(SECONDS.len());
    let mut kept = kept();
    if kept.len() >= ROUTES && !kept.contains_key(route) {
        return;
    }
    let buckets = kept.entry(route.to_owned()).or_insert_with(|| vec![None; SECONDS.len() + 1]);
    buckets[bucket] = Some(Exemplar { trace, seconds, at });
}

/// The page as OpenMetrics: families of counters are named without `_total`, exemplars are added, and it has an end.
pub(super) fn openmetrics(page: &str) -> String {
    let kept = kept();
    let mut text = String::with_capacity(page.len() + 4096);
    let counters: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .filter(|family| family.ends_with("_total"))
        .collect();
    for line in page.lines().filter(|line| !line.is_empty()) {
        let renamed = line.strip_prefix("# TYPE ").or_else(|| line.strip_prefix("# HELP ")).and_then(|rest| {
            let (family, rest) = rest.split_once(' ')?;
            let short = counters.contains(&family).then(|| family.strip_suffix("_total"))??;
            Some(format!("{}{short} {rest}", &line[..7]))
        });
        text.push_str(renamed.as_deref().unwrap_or(line));
        if let Some(exemplar) = exemplar_of(line, &kept) {
            let Exemplar { trace, seconds, at } = exemplar;
            let _ = write!(text, " # {{trace_id=\"{trace}\"}} {seconds} {at:.3}");
        }
        text.push('\n');
    }
    text.push_str("# EOF\n");
    text
}

/// The exemplar of a bucket's line: `relay_http_seconds_bucket{route="…",le="0.1"} 5`.
fn exemplar_of<'a>(line: &str, kept: &'a Kept) -> Option<&'a Exemplar> {
    line.strip_prefix(name::HTTP_SECONDS)?.strip_prefix("_bucket{")?;
    let label = |wanted: &str| {
        // Templates of routes hold neither quotes nor commas, but they hold braces.
        let (_, rest) = line.split_once(&format!("{wanted}=\""))?;
        Some(rest.split_once('"')?.0)
    };
    let bound = label("le")?;
    let bucket = match bound {
        "+Inf" => SECONDS.len(),
        number => SECONDS.iter().position(|known| Some(*known) == number.parse().ok())?,
    };
    kept.get(label("route")?)?.get(bucket)?.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_request_leads_to_its_trace() {
        let route = "/v1/tests/{id}";
        note(route, 0.07, "0af7651916cd43dd8448eb211c80319c".to_owned());
        note(route, 99.0, "1af7651916cd43dd8448eb211c80319c".to_owned());
        let page = format!(
            "# HELP relay_x_total Things.\n# TYPE relay_x_total counter\nrelay_x_total 5\n\n\
             # TYPE relay_http_seconds histogram\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"0.05\"}} 0\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"0.1\"}} 1\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"+Inf\"}} 2\n\
             relay_http_seconds_bucket{{route=\"/other\",le=\"0.1\"}} 1\n"
        );
        let text = openmetrics(&page);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..3], ["# HELP relay_x Things.", "# TYPE relay_x counter", "relay_x_total 5"]);
        assert!(!lines[4].contains("trace_id"), "{}", lines[4]);
        assert!(lines[5].contains(" 1 # {trace_id=\"0af7651916cd43dd8448eb211c80319c\"} 0.07 "), "{}", lines[5]);
        assert!(lines[6].contains(" 2 # {trace_id=\"1af7651916cd43dd8448eb211c80319c\"} 99 "), "{}", lines[6]);
        assert!(!lines[7].contains("trace_id"), "{}", lines[7]);
        assert_eq!(lines[8], "# EOF");
    }
}
