//! Metrics to an OTLP collector, for whoever does not scrape: the same page that Prometheus gets, once a period.
//!
//! Off unless asked for: `OTEL_METRICS_EXPORTER=otlp` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` switches it on.

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
use crate::otel::{self, Wanted};

/// Sends the metrics until `stop`, and once more then, if the environment asks for it.
///
/// # Errors
/// When a variable of the export cannot be used.
pub fn export(service: &'static str, handle: Handle, stop: CancellationToken) -> Result<()> {
    let wanted = Wanted::read()?;
    let Some(target) = wanted.metrics else { return Ok(()) };
    let mut sender = Sender {
        client: MetricsServiceClient::new(target.channel()?),
        headers: target.metadata()?,
        resource: resource(service),
        handle,
        began: nanos(),
        told: false,
    };
    tokio::spawn(async move {
        while stop.run_until_cancelled(tokio::time::sleep(wanted.period)).await.is_some() {
            sender.send().await;
        }
        sender.send().await;
    });
    Ok(())
}

/// Who sends, as spans say it too. Several processes of a service are told apart by it.
fn resource(service: &'static str) -> Resource {
    let said = otel::resource(service);
    let attributes = said.iter().map(|(key, value)| attribute(key.as_str(), &value.as_str())).collect();
    Resource { attributes, ..Resource::default() }
}

struct Sender {
    client: MetricsServiceClient<Channel>,
    headers: MetadataMap,
    resource: Resource,
    handle: Handle,
    /// When counting began.
    began: u64,
    /// Whether the collector's outage has been logged.
    told: bool,
}

impl Sender {
    async fn send(&mut self) {
        let metrics = read(&self.handle.render(), self.began, nanos());
        let scope = InstrumentationScope { name: "relay".to_owned(), ..InstrumentationScope::default() };
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        let mut request = Request::new(ExportMetricsServiceRequest { resource_metrics });
        *request.metadata_mut() = self.headers.clone();
        match self.client.export(request).await {
            Ok(_) => self.told = false,
            // Once per outage. Numbers are totals: the next time makes up for it.
            Err(error) if !self.told => {
                tracing::warn!(%error, "metrics could not be exported");
                self.told = true;
            }
            Err(_) => {}
        }
    }
}

fn nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// A family of the page.
#[derive(Default)]
struct Family<'a> {
    help: &'a str,
    kind: &'a str,
    /// Series and their value.
    values: Vec<(Vec<KeyValue>, f64)>,
    /// Of histograms, by their labels without `le`.
    histograms: BTreeMap<String, Buckets>,
}

#[derive(Default)]
struct Buckets {
    attributes: Vec<KeyValue>,
    /// Bound and how many were not above it. Without a bound: all.
    cumulative: Vec<(Option<f64>, u64)>,
    sum: f64,
}

/// The metrics of a page in Prometheus' text format.
fn read(page: &str, began: u64, now: u64) -> Vec<Metric> {
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
                family.values.push((attributes(labels), value));
                continue;
            }
            for part in ["_bucket", "_sum", "_count"] {
                let family = name.strip_suffix(part).and_then(|family| families.get_mut(family));
                if let Some(family) = family {
                    family.part(part, labels, value);
                }
            }
        }
    }
    families.into_iter().filter_map(|(name, family)| family.metric(name, began, now)).collect()
}

impl Family<'_> {
    fn part(&mut self, part: &str, labels: &str, value: f64) {
        let mut attributes = attributes(labels);
        let bound = attributes.iter().position(|label| label.key == "le").map(|nth| attributes.remove(nth));
        let buckets = self.histograms.entry(format!("{attributes:?}")).or_default();
        buckets.attributes = attributes;
        match part {
            "_sum" => buckets.sum = value,
            "_bucket" => {
                let bound = bound.and_then(|label| match label.value?.value? {
                    any_value::Value::StringValue(text) => text.parse().ok().filter(|bound: &f64| bound.is_finite()),
                    _ => None,
                });
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
                buckets.cumulative.push((bound, value as u64));
            }
            // The bucket without a bound says the same.
            _ => {}
        }
    }

    fn metric(self, name: &str, began: u64, now: u64) -> Option<Metric> {
        let points = |values: Vec<(Vec<KeyValue>, f64)>| {
            let point = |(attributes, value)| NumberDataPoint {
                attributes,
                start_time_unix_nano: began,
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
                data_points: self.histograms.into_values().map(|buckets| buckets.point(began, now)).collect(),
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

impl Buckets {
    fn point(self, began: u64, now: u64) -> HistogramDataPoint {
        let mut before = 0;
        let mut counts = Vec::with_capacity(self.cumulative.len());
        for (_, count) in &self.cumulative {
            counts.push(count.saturating_sub(before));
            before = *count;
        }
        HistogramDataPoint {
            attributes: self.attributes,
            start_time_unix_nano: began,
            time_unix_nano: now,
            count: before,
            sum: Some(self.sum),
            explicit_bounds: self.cumulative.iter().filter_map(|(bound, _)| *bound).collect(),
            bucket_counts: counts,
            ..HistogramDataPoint::default()
        }
    }
}

/// Labels as they stand between braces.
fn attributes(labels: &str) -> Vec<KeyValue> {
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
        let mut metrics = read(page, 1, 2);
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
