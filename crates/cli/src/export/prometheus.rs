//! Prometheus' text format.

use ::prometheus::{
    Encoder, Result, TextEncoder,
    proto::{Counter, Gauge, LabelPair, Metric as Line, MetricFamily, MetricType},
};

use gpumem_metrics::schema::{Kind, Metric, label};

use super::metrics::{Attributes, METRICS, Points};

pub(super) const CONTENT_TYPE: &str = ::prometheus::TEXT_FORMAT;

/// Returns all points as text.
pub(super) fn text(points: &Points) -> Result<Vec<u8>> {
    let families = METRICS.iter().map(|metric| family(metric, points));
    // The format does not allow families without points.
    let families: Vec<_> = families.filter(|family| !family.get_metric().is_empty()).collect();
    let mut text = Vec::new();
    TextEncoder::new().encode(&families, &mut text)?;
    Ok(text)
}

fn family(metric: &Metric, points: &Points) -> MetricFamily {
    let is_counter = metric.kind == Kind::Counter;
    let line = |(attributes, value): (&Attributes, f64)| {
        let mut line = Line::from_label(attributes.iter().map(pair).collect());
        if is_counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            line.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            line.set_gauge(gauge);
        }
        line
    };
    let mut family = MetricFamily::default();
    family.set_name(metric.prometheus_name());
    family.set_help(metric.help.to_owned());
    family.set_field_type(if is_counter { MetricType::COUNTER } else { MetricType::GAUGE });
    family.set_metric(points.of_metric(metric).map(line).collect());
    family
}

fn pair((name, value): &(&'static str, String)) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(label(name));
    pair.set_value(value.clone());
    pair
}
