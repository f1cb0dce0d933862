//! Form of ids in JSON that only the engine reads, such as positions of scans: a number. For
//! `#[serde(with = "as_number")]` and, on ids that may be absent, `#[serde(with = "as_number::option")]`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Id that is a newtype over a number.
pub trait NumericId: Copy {
    /// Wraps a number.
    fn from_number(number: i64) -> Self;
    /// Returns the number.
    fn to_number(self) -> i64;
}

/// Serializes an id as a number.
///
/// # Errors
/// If the serializer fails.
pub fn serialize<I: NumericId, S: Serializer>(id: &I, serializer: S) -> Result<S::Ok, S::Error> {
    id.to_number().serialize(serializer)
}

/// Deserializes an id from a number.
///
/// # Errors
/// When the value is not a number of 64 bits.
pub fn deserialize<'de, I: NumericId, D: Deserializer<'de>>(deserializer: D) -> Result<I, D::Error> {
    i64::deserialize(deserializer).map(I::from_number)
}

/// The same form of ids that may be absent.
pub mod option {
    use super::{Deserialize, Deserializer, NumericId, Serialize, Serializer};

    /// Serializes an id as a number, or as null.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<I: NumericId, S: Serializer>(id: &Option<I>, serializer: S) -> Result<S::Ok, S::Error> {
        id.map(I::to_number).serialize(serializer)
    }

    /// Deserializes an id from a number or null.
    ///
    /// # Errors
    /// When the value is neither.
    pub fn deserialize<'de, I: NumericId, D: Deserializer<'de>>(deserializer: D) -> Result<Option<I>, D::Error> {
        Ok(Option::<i64>::deserialize(deserializer)?.map(I::from_number))
    }
}
