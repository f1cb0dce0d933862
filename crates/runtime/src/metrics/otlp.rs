//! OTLP export of metrics, for installations that do not scrape: it periodically converts the Prometheus page.
//!
//! Disabled by default; `OTEL_METRICS_EXPORTER=otlp` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` enables it.

use std::{
    collections::{BTreeMap, HashMap},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use opentelemetry_proto::tonic::{
    collector::metrics::v1::{ExportMetricsServiceRequest, metrics_service_client::MetricsServiceClient},
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
        ScopeMetrics, Sum, metric::Data, number_data_point,
    },
    resource::v1::Resource,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, metadata::MetadataMap, transport::Channel};

use super::Handle;
use crate::otel::{self, TelemetryConfig};

/// Returns the task that exports metrics until `stop`, and once more at the end, if the environment enables it.
///
/// # Errors
/// If a variable of the export is invalid.
pub fn export_metrics(
    service: &'static str,
    handle: Handle,
    stop: CancellationToken,
) -> Result<Option<impl Future<Output = ()> + Send + 'static>> {
    let config = TelemetryConfig::read()?;
    let Some(target) = config.metrics else { return Ok(None) };
    let mut exporter = MetricsExporter {
        client: MetricsServiceClient::new(target.channel()?),
        headers: target.metadata()?,
        resource: build_resource(service),
        handle,
        started_at: unix_nanos(),
        outage_logged: false,
    };
    Ok(Some(async move {
        while stop.run_until_cancelled(tokio::time::sleep(config.period)).await.is_some() {
            exporter.send().await;
        }
        exporter.send().await;
    }))
}

/// Builds the resource that spans use too. It distinguishes the processes of a service.
fn build_resource(service: &'static str) -> Resource {
    let shared = otel::resource(service);
    let attributes = shared.iter().map(|(key, value)| attribute(key.as_str(), &value.as_str())).collect();
    Resource { attributes, ..Resource::default() }
}

struct MetricsExporter {
    client: MetricsServiceClient<Channel>,
    headers: MetadataMap,
    resource: Resource,
    handle: Handle,
    /// Start of counting.
    started_at: u64,
    /// True if the current outage of the collector has been logged.
    outage_logged: bool,
}

impl MetricsExporter {
    async fn send(&mut self) {
        let metrics = parse_page(&self.handle.render(), self.started_at, unix_nanos());
        let scope = InstrumentationScope { name: "relay".to_owned(), ..InstrumentationScope::default() };
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        let mut request = Request::new(ExportMetricsServiceRequest { resource_metrics });
        *request.metadata_mut() = self.headers.clone();
        match self.client.export(request).await {
            Ok(_) => self.outage_logged = false,
            // Logged once per outage. Values are totals, so the next export includes this one.
            Err(error) if !self.outage_logged => {
                tracing::warn!(%error, "metrics export failed, retrying");
                self.outage_logged = true;
            }
            Err(_) => {}
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "collectors compare measurements with their own clocks")]
fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// Metric family of the page.
#[derive(Default)]
struct Family<'a> {
    help: &'a str,
    kind: &'a str,
    /// Series with their values.
    values: Vec<(Vec<KeyValue>, f64)>,
    /// Histogram series, by their labels without `le`.
    histograms: BTreeMap<String, HistogramSeries>,
}

#[derive(Default)]
struct HistogramSeries {
    attributes: Vec<KeyValue>,
    /// Upper bound and cumulative count. The entry without a bound counts all.
    cumulative: Vec<(Option<f64>, u64)>,
    sum: f64,
}

/// Parses a page in the Prometheus text format.
fn parse_page(page: &str, started_at: u64, now: u64) -> Vec<Metric> {
    let mut families: HashMap<&str, Family<'_>> = HashMap::new();
    for line in page.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name).or_default().help = help;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name).or_default().kind = kind;
        } else if let Some((series, value)) = line.rsplit_once(' ') {
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.strip_suffix('}').unwrap_or_default();
            if let Some(family) = families.get_mut(name) {
                family.values.push((parse_labels(labels), value));
                continue;
            }
            for part in ["_bucket", "_sum", "_count"] {
                let family = name.strip_suffix(part).and_then(|family| families.get_mut(family));
                if let Some(family) = family {
                    family.add_histogram_part(part, labels, value);
                }
            }
        }
    }
    families.into_iter().filter_map(|(name, family)| family.into_metric(name, started_at, now)).collect()
}

impl Family<'_> {
    fn add_histogram_part(&mut self, part: &str, labels: &str, value: f64) {
        let mut attributes = parse_labels(labels);
        let bound = attributes.iter().position(|label| label.key == "le").map(|nth| attributes.remove(nth));
        let buckets = self.histograms.entry(format!("{attributes:?}")).or_default();
        buckets.attributes = attributes;
        match part {
            "_sum" => buckets.sum = value,
            "_bucket" => {
                let bound = bound.and_then(|label| {
                    let any_value::Value::StringValue(text) = label.value?.value? else { return None };
                    text.parse().ok().filter(|bound: &f64| bound.is_finite())
                });
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
                buckets.cumulative.push((bound, value as u64));
            }
            // The unbounded bucket contains the same count.
            _ => {}
        }
    }

    fn into_metric(self, name: &str, started_at: u64, now: u64) -> Option<Metric> {
        let points = |values: Vec<(Vec<KeyValue>, f64)>| {
            let point = |(attributes, value)| NumberDataPoint {
                attributes,
                start_time_unix_nano: started_at,
                time_unix_nano: now,
                value: Some(number_data_point::Value::AsDouble(value)),
                ..NumberDataPoint::default()
            };
            values.into_iter().map(point).collect::<Vec<_>>()
        };
        let cumulative = AggregationTemporality::Cumulative.into();
        let data = match self.kind {
            "counter" => Data::Sum(Sum {
                data_points: points(self.values),
                aggregation_temporality: cumulative,
                is_monotonic: true,
            }),
            "gauge" => Data::Gauge(Gauge { data_points: points(self.values) }),
            "histogram" => Data::Histogram(Histogram {
                data_points: self.histograms.into_values().map(|buckets| buckets.into_point(started_at, now)).collect(),
                aggregation_temporality: cumulative,
            }),
            _ => return None,
        };
        let unit = if name.ends_with("_seconds") { "s" } else { "" };
        Some(Metric {
            name: name.to_owned(),
            description: self.help.to_owned(),
            unit: unit.to_owned(),
            data: Some(data),
            ..Metric::default()
        })
    }
}

impl HistogramSeries {
    fn into_point(self, started_at: u64, now: u64) -> HistogramDataPoint {
        let mut before = 0;
        let mut counts = Vec::with_capacity(self.cumulative.len());
        for (_, count) in &self.cumulative {
            counts.push(count.saturating_sub(before));
            before = *count;
        }
        HistogramDataPoint {
            attributes: self.attributes,
            start_time_unix_nano: started_at,
            time_unix_nano: now,
            count: before,
            sum: Some(self.sum),
            explicit_bounds: self.cumulative.iter().filter_map(|(bound, _)| *bound).collect(),
            bucket_counts: counts,
            ..HistogramDataPoint::default()
        }
    }
}

/// Parses the labels between braces.
fn parse_labels(labels: &str) -> Vec<KeyValue> {
    let mut found = Vec::new();
    let mut rest = labels;
    while let Some((key, value)) = rest.split_once("=\"") {
        let (mut text, mut escaped, mut end) = (String::new(), false, value.len());
        for (at, letter) in value.char_indices() {
            match letter {
                'n' if escaped => text.push('\n'),
                _ if escaped => text.push(letter),
                '\\' => {
                    escaped = true;
                    continue;
                }
                '"' => {
                    end = at;
                    break;
                }
                _ => text.push(letter),
            }
            escaped = false;
        }
        found.push(attribute(key.trim_start_matches(','), &text));
        rest = value.get(end + 1..).unwrap_or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_becomes_sums_gauges_and_histograms() {
        let page = "# HELP relay_a_total Things.\n# TYPE relay_a_total counter\n\
                    relay_a_total{reason=\"x, \\\"y\\\"\",b=\"2\"} 5\n\n\
                    # TYPE relay_g gauge\nrelay_g 1.5\n\n\
                    # TYPE relay_h_seconds histogram\n\
                    relay_h_seconds_bucket{route=\"/v1/{id}\",le=\"0.1\"} 2\n\
                    relay_h_seconds_bucket{route=\"/v1/{id}\",le=\"1\"} 5\n\
                    relay_h_seconds_bucket{route=\"/v1/{id}\",le=\"+Inf\"} 6\n\
                    relay_h_seconds_sum{route=\"/v1/{id}\"} 7.5\n\
                    relay_h_seconds_count{route=\"/v1/{id}\"} 6\n";
        let mut metrics = parse_page(page, 1, 2);
        metrics.sort_by(|a, b| a.name.cmp(&b.name));
        let [a, g, h] = &metrics[..] else { panic!("{metrics:?}") };
        let Some(Data::Sum(sum)) = &a.data else { panic!("{a:?}") };
        assert_eq!((a.description.as_str(), sum.is_monotonic), ("Things.", true));
        assert_eq!(sum.data_points[0].attributes, [attribute("reason", "x, \"y\""), attribute("b", "2")]);
        assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(5.0)));
        let Some(Data::Gauge(gauge)) = &g.data else { panic!("{g:?}") };
        assert_eq!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(1.5)));
        let Some(Data::Histogram(histogram)) = &h.data else { panic!("{h:?}") };
        let [point] = &histogram.data_points[..] else { panic!("{histogram:?}") };
        assert_eq!((h.unit.as_str(), point.count, point.sum), ("s", 6, Some(7.5)));
        assert_eq!(point.attributes, [attribute("route", "/v1/{id}")]);
        assert_eq!((&point.explicit_bounds[..], &point.bucket_counts[..]), (&[0.1, 1.0][..], &[2, 3, 1][..]));
    }
}
