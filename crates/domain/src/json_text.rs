//! [`JsonText`]: JSON of clients that is passed on and never looked into, such as the blocks of a message.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
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

    /// Parses the value. Only for values with a small bound.
    #[must_use]
    pub fn to_value(&self) -> Value {
        serde_json::from_str(self.get()).unwrap_or_default()
    }
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
        serde_transcode::transcode(deserializer, &mut serde_json::Serializer::new(&mut text)).map_err(D::Error::custom)?;
        let text = String::from_utf8(text).map_err(D::Error::custom)?;
        Ok(Self(RawValue::from_string(text).map_err(D::Error::custom)?.into()))
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
