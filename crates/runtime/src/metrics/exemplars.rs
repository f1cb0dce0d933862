//! Exemplars: a recent trace for each bucket of the request histogram, which lead from a slow request on a dashboard
//! to its trace.
//!
//! The recorder does not support them, so they are kept here and added to the page for clients that accept
//! OpenMetrics, the only format with exemplars.

use std::{
    collections::HashMap,
    fmt::Write as _,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use relay_domain::metric_names as name;

use super::SECONDS;

/// Maximum routes with exemplars; there are fewer route templates.
const MAX_ROUTES: usize = 512;

/// Media type by which clients request OpenMetrics, and the one of the response.
pub(super) const OPENMETRICS: &str = "application/openmetrics-text";
pub(super) const OPENMETRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone)]
struct Exemplar {
    trace: String,
    seconds: f64,
    at: f64,
}

/// Newest exemplar per route and bucket; the last bucket is unbounded.
type Exemplars = HashMap<String, Vec<Option<Exemplar>>>;

fn lock_exemplars() -> MutexGuard<'static, Exemplars> {
    static EXEMPLARS: OnceLock<Mutex<Exemplars>> = OnceLock::new();
    EXEMPLARS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records the trace of a request as the exemplar of its bucket.
#[expect(clippy::disallowed_methods, reason = "collectors compare exemplars with their own clocks")]
pub fn record_exemplar(route: &str, seconds: f64, trace: String) {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let bucket = SECONDS.iter().position(|bound| seconds <= *bound).unwrap_or(SECONDS.len());
    let mut exemplars = lock_exemplars();
    if exemplars.len() >= MAX_ROUTES && !exemplars.contains_key(route) {
        return;
    }
    let buckets = exemplars.entry(route.to_owned()).or_insert_with(|| vec![None; SECONDS.len() + 1]);
    buckets[bucket] = Some(Exemplar { trace, seconds, at });
}

/// Converts a page to OpenMetrics: names counter families without `_total`, adds exemplars and the end mark.
pub(super) fn render_openmetrics(page: &str) -> String {
    let exemplars = lock_exemplars();
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
        if let Some(exemplar) = find_exemplar(line, &exemplars) {
            let Exemplar { trace, seconds, at } = exemplar;
            // Writing to a `String` cannot fail.
            let _ = write!(text, " # {{trace_id=\"{trace}\"}} {seconds} {at:.3}");
        }
        text.push('\n');
    }
    text.push_str("# EOF\n");
    text
}

/// Finds the exemplar of a bucket line such as `relay_http_seconds_bucket{route="…",le="0.1"} 5`.
fn find_exemplar<'a>(line: &str, exemplars: &'a Exemplars) -> Option<&'a Exemplar> {
    line.strip_prefix(name::HTTP_SECONDS)?.strip_prefix("_bucket{")?;
    let label = |wanted: &str| {
        // Route templates contain braces, but neither quotes nor commas.
        let (_, rest) = line.split_once(&format!("{wanted}=\""))?;
        Some(rest.split_once('"')?.0)
    };
    let bound = label("le")?;
    let bucket = match bound {
        "+Inf" => SECONDS.len(),
        number => SECONDS.iter().position(|known| Some(*known) == number.parse().ok())?,
    };
    exemplars.get(label("route")?)?.get(bucket)?.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_request_has_an_exemplar_with_its_trace() {
        let route = "/v1/tests/{id}";
        record_exemplar(route, 0.07, "0af7651916cd43dd8448eb211c80319c".to_owned());
        record_exemplar(route, 99.0, "1af7651916cd43dd8448eb211c80319c".to_owned());
        let page = format!(
            "# HELP relay_x_total Things.\n# TYPE relay_x_total counter\nrelay_x_total 5\n\n\
             # TYPE relay_http_seconds histogram\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"0.05\"}} 0\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"0.1\"}} 1\n\
             relay_http_seconds_bucket{{route=\"{route}\",le=\"+Inf\"}} 2\n\
             relay_http_seconds_bucket{{route=\"/other\",le=\"0.1\"}} 1\n"
        );
        let text = render_openmetrics(&page);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..3], ["# HELP relay_x Things.", "# TYPE relay_x counter", "relay_x_total 5"]);
        assert!(!lines[4].contains("trace_id"), "{}", lines[4]);
        assert!(lines[5].contains(" 1 # {trace_id=\"0af7651916cd43dd8448eb211c80319c\"} 0.07 "), "{}", lines[5]);
        assert!(lines[6].contains(" 2 # {trace_id=\"1af7651916cd43dd8448eb211c80319c\"} 99 "), "{}", lines[6]);
        assert!(!lines[7].contains("trace_id"), "{}", lines[7]);
        assert_eq!(lines[8], "# EOF");
    }
}
