//! [`JsonText`]: JSON of clients that is passed on and never looked into, such as the blocks of a message.

use std::{fmt, sync::Arc};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

/// A JSON value as compact text, shared by its copies.
///
/// A parsed [`Value`] takes up to 80 times the bytes of its text, so a megabyte of small objects would take 80 MB for
/// each copy of a message. The text is valid for every reader: numbers fit into their types, and strings are Unicode.
#[derive(Clone)]
pub struct JsonText(Arc<RawValue>);

impl JsonText {
    /// Encodes a value; `null` if it does not encode.
    #[must_use]
    pub fn encode<T: Serialize + ?Sized>(value: &T) -> Self {
        // Only a map whose keys are not strings does not encode.
        Self(serde_json::value::to_raw_value(value).unwrap_or_default().into())
    }

    /// Takes over text that was checked when it was stored.
    #[must_use]
    pub fn from_stored(text: Box<RawValue>) -> Self {
        Self(text.into())
    }

    /// Returns the empty object.
    #[must_use]
    pub fn empty_object() -> Self {
        Self::encode(&serde_json::Map::new())
    }

    /// Returns the text.
    #[must_use]
    pub fn get(&self) -> &str {
        self.0.get()
    }

    /// Returns the number of bytes of the text.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.get().len()
    }

    /// Returns whether the value is `null`.
    #[must_use]
    pub fn is_null(&self) -> bool {
        // The text is compact: here and below, its first byte tells the type of the value.
        self.get() == "null"
    }

    /// Returns whether the value is an array.
    #[must_use]
    pub fn is_array(&self) -> bool {
        self.get().starts_with('[')
    }

    /// Returns whether the value is an object.
    #[must_use]
    pub fn is_object(&self) -> bool {
        self.get().starts_with('{')
    }

    /// Returns the entries of an object, none of anything else.
    #[must_use]
    pub fn entries(&self) -> JsonEntries {
        // Only a text that is not an object fails.
        serde_json::from_str(self.get()).unwrap_or_default()
    }

    /// Parses the value. Only for values with a small bound.
    #[must_use]
    pub fn to_value(&self) -> Value {
        // The text was checked, so it parses.
        serde_json::from_str(self.get()).unwrap_or_default()
    }
}

/// Returns the number of bytes of a value as JSON text.
#[must_use]
pub fn encoded_length(value: &Value) -> usize {
    value.to_string().len()
}

impl fmt::Debug for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get())
    }
}

impl PartialEq for JsonText {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl From<Value> for JsonText {
    fn from(value: Value) -> Self {
        Self::encode(&value)
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JsonText {
    /// Copies the value piece by piece, so that spaces disappear and what no client could parse is refused.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut text = Vec::new();
        serde_transcode::transcode(deserializer, &mut serde_json::Serializer::new(&mut text))
            .map_err(D::Error::custom)?;
        let text = String::from_utf8(text).map_err(D::Error::custom)?;
        Ok(Self(RawValue::from_string(text).map_err(D::Error::custom)?.into()))
    }
}

/// Entries of a JSON object in their order, the values as text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JsonEntries(Vec<(String, JsonText)>);

impl JsonEntries {
    /// Returns whether there is an entry with this key.
    #[must_use]
    pub fn contains_key(&self, key: &str) -> bool {
        self.0.iter().any(|(own, _)| own == key)
    }

    /// Sets an entry. One with the same key keeps its place.
    pub fn insert(&mut self, key: String, value: JsonText) {
        match self.0.iter_mut().find(|(own, _)| *own == key) {
            Some((_, own)) => *own = value,
            None => self.0.push((key, value)),
        }
    }

    /// Keeps the entries whose keys satisfy a condition.
    pub fn retain(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.0.retain(|(key, _)| is_kept(key));
    }
}

impl FromIterator<(String, JsonText)> for JsonEntries {
    fn from_iter<I: IntoIterator<Item = (String, JsonText)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl IntoIterator for JsonEntries {
    type Item = (String, JsonText);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl Serialize for JsonEntries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for JsonEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = JsonEntries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonEntries, A::Error> {
                let mut entries = Vec::new();
                while let Some((key, value)) = map.next_entry()? {
                    entries.push((key, JsonText::from_stored(value)));
                }
                Ok(JsonEntries(entries))
            }
        }

        deserializer.deserialize_map(EntryVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_compact_and_keep_their_order() {
        let text: JsonText = serde_json::from_str("[ { \"b\" : 1.0,\n \"a\": \"\\u0041\\n\" }, null ]").unwrap();
        assert_eq!(text.get(), r#"[{"b":1.0,"a":"A\n"},null]"#);
        assert_eq!(serde_json::to_string(&text).unwrap(), text.get());
        assert!(text.is_array() && !text.is_object() && !text.is_null());
    }

    #[test]
    fn text_that_no_client_could_parse_is_refused() {
        for text in [r#"[1e999]"#, r#"["\ud800"]"#, "[1,]", "[1"] {
            assert!(serde_json::from_str::<JsonText>(text).is_err(), "{text}");
        }
    }
}
