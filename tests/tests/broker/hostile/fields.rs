//! Fields of bodies and frames, and values that they do not take.

use serde_json::{Value, json};

/// Type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    /// One of a few words.
    Word,
    Number,
    Flag,
    List,
    Object,
    Schema,
    /// Every value is taken.
    Any,
    /// No value at all is taken.
    Never,
}

impl Kind {
    /// Values that a field of this type does not take.
    pub(super) fn wrong_values(self) -> Vec<Value> {
        let values = [
            (Self::Text, json!("text")),
            (Self::Number, json!(7)),
            (Self::Flag, json!(true)),
            (Self::List, json!([[]])),
            (Self::Object, json!({ "x": [] })),
        ];
        let others = values.into_iter().filter(|(kind, _)| *kind != self).map(|(_, value)| value).collect();
        let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
        match self {
            Self::Schema => vec![json!("text"), json!(7), json!([[]]), json!({ "type": 5 })],
            Self::Number => [others, vec![json!(-1), json!(1.5), json!(1e300), json!("24"), deep]].concat(),
            Self::List => [others, vec![json!([7]), json!([null]), json!([[7]]), deep]].concat(),
            Self::Any => Vec::new(),
            // Not the values of an object's fields in their order either.
            Self::Object => [others, vec![json!([]), deep]].concat(),
            Self::Text | Self::Word | Self::Flag | Self::Never => [others, vec![deep]].concat(),
        }
    }
}

/// Name and type of a field, and a right value as JSON where the body cannot be without it.
pub(super) type Field = (&'static str, Kind, Option<&'static str>);
