//! Field types that need more than their Rust type for a schema.

use std::fmt;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned, de::Error as _};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Schema of an id. The ids themselves are domain types.
#[derive(Debug, ToSchema)]
#[schema(value_type = String, pattern = "^[0-9]{1,19}$", examples("243812004871278592"))]
pub struct Id(pub i64);

/// Instant in the format `2026-03-01T12:00:00.000Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, format = DateTime, examples("2026-03-01T12:00:00.000Z"))]
pub struct Timestamp(pub DateTime<Utc>);

impl From<DateTime<Utc>> for Timestamp {
    fn from(instant: DateTime<Utc>) -> Self {
        Self(instant)
    }
}

impl Timestamp {
    fn to_text(self) -> String {
        // `DateTime::format` would interpret its pattern at each call.
        self.0.to_rfc3339_opts(SecondsFormat::Millis, true)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text())
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_text())
    }
}

/// A shape as a JSON value, for storage and for what is composed of several shapes.
pub trait ToValue {
    /// Encodes the shape with its fields in their order.
    fn to_value(&self) -> Value;
}

impl<T: Serialize> ToValue for T {
    fn to_value(&self) -> Value {
        // Shapes consist of strings, numbers and JSON values, which always encode.
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Distinguishes a field that is `null` from an absent one: `#[serde(default, deserialize_with = "present")]`.
///
/// # Errors
/// If the value has another type.
pub fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Refuses `null` for a field that may be absent: `#[serde(default, deserialize_with = "not_null")]`.
///
/// # Errors
/// If the value is `null` or has another type.
pub fn not_null<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Reads a shape from an object only. Derived implementations also take a list of the fields' values.
///
/// # Errors
/// If the value is no object, or one with other fields.
pub fn object<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let fields = Map::deserialize(deserializer)?;
    T::deserialize(Value::Object(fields)).map_err(D::Error::custom)
}

/// Like [`object`] for a field that may be `null`.
///
/// # Errors
/// If the value is neither `null` nor an object, or an object with other fields.
pub fn optional_object<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let fields: Option<Map<String, Value>> = Option::deserialize(deserializer)?;
    fields.map(|fields| T::deserialize(Value::Object(fields)).map_err(D::Error::custom)).transpose()
}

/// Like [`object`] for each entry of a list.
///
/// # Errors
/// If the value is no list, or has an entry that [`object`] does not take.
pub fn objects<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let list: Vec<Map<String, Value>> = Vec::deserialize(deserializer)?;
    list.into_iter().map(|fields| T::deserialize(Value::Object(fields)).map_err(D::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_have_milliseconds_and_a_z() {
        let instant = DateTime::from_timestamp(1_772_366_400, 7_900_000).unwrap();
        assert_eq!(Timestamp(instant).to_string(), "2026-03-01T12:00:00.007Z");
    }

    #[test]
    fn timestamps_are_those_of_the_pattern() {
        for (seconds, nanos) in [(0, 0), (1, 999_999_999), (951_782_400, 1), (4_102_444_799, 500_000_000)] {
            let instant = DateTime::from_timestamp(seconds, nanos).unwrap();
            let expected = instant.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string();
            assert_eq!(Timestamp(instant).to_string(), expected);
            assert_eq!(serde_json::to_value(Timestamp(instant)).unwrap(), expected);
        }
    }

    #[test]
    fn lists_are_no_objects() {
        #[derive(Debug, PartialEq, Deserialize)]
        struct Inner {
            #[serde(default)]
            topic: String,
        }
        #[derive(Debug, PartialEq, Deserialize)]
        struct Body {
            #[serde(deserialize_with = "object")]
            one: Inner,
            #[serde(default, deserialize_with = "optional_object")]
            other: Option<Inner>,
            #[serde(default, deserialize_with = "objects")]
            all: Vec<Inner>,
        }
        let read = |json: &str| serde_json::from_str::<Body>(json);
        let inner = |topic: &str| Inner { topic: topic.to_owned() };
        let body = read(r#"{"one":{"topic":"x"},"other":null,"all":[{"topic":"y"},{}]}"#).unwrap();
        assert_eq!(body, Body { one: inner("x"), other: None, all: vec![inner("y"), inner("")] });
        assert_eq!(read(r#"{"one":{},"other":{"topic":"x"}}"#).unwrap().other, Some(inner("x")));
        for wrong in [r#"{"one":["x"]}"#, r#"{"one":null}"#, r#"{"one":{},"other":[]}"#, r#"{"one":{},"all":[["x"]]}"#]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn null_is_not_absent() {
        #[derive(Deserialize)]
        struct Body {
            #[serde(default, deserialize_with = "present")]
            topic: Option<Option<String>>,
        }
        for (json, expected) in
            [("{}", None), (r#"{"topic":null}"#, Some(None)), (r#"{"topic":"x"}"#, Some(Some("x".to_owned())))]
        {
            assert_eq!(serde_json::from_str::<Body>(json).unwrap().topic, expected);
        }
    }
}
