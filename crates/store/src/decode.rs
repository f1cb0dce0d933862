//! Decoding of rows into typed values. A value that does not decode is [`StoreError::Corrupt`], never a default.

use std::{error::Error, fmt::Write as _, str::FromStr};

use relay_domain::JsonText;
use serde_json::value::RawValue;
use sqlx::{Column, FromRow, Row, postgres::PgRow, types::Json};

use crate::{StoreError, StoreResult};

/// Maximum number of columns by which an error names a row.
const MAX_KEY_COLUMNS: usize = 6;

/// Decodes a row of `table`, the first table that the statement reads.
#[expect(clippy::wildcard_enum_match_arm, reason = "sqlx may add errors")]
pub(crate) fn decode_row<T: for<'r> FromRow<'r, PgRow>>(table: &'static str, row: &PgRow) -> StoreResult<T> {
    T::from_row(row).map_err(|source| match source {
        sqlx::Error::ColumnDecode { ref index, .. } => {
            StoreError::Corrupt { table, column: index.trim_matches('"').to_owned(), row: key_of(row), source }
        }
        // A row without an expected column is a fault of the statement, not of the data.
        source => StoreError::Refused { doing: "decoding a row", source },
    })
}

/// Decodes rows of `table`. Fails at the first one that does not decode.
pub(crate) fn decode_rows<T: for<'r> FromRow<'r, PgRow>>(table: &'static str, rows: &[PgRow]) -> StoreResult<Vec<T>> {
    rows.iter().map(|row| decode_row(table, row)).collect()
}

/// Decodes a column that stores a value by its name.
pub(crate) fn parse_column<T>(row: &PgRow, column: &str) -> sqlx::Result<T>
where
    T: FromStr<Err: Error + Send + Sync + 'static>,
{
    let name: &str = row.try_get(column)?;
    name.parse().map_err(|source| sqlx::Error::ColumnDecode { index: column.to_owned(), source: Box::new(source) })
}

/// Converts a stored number into a count. A negative one is corrupt.
pub(crate) fn to_count<T, N>(column: &str, stored: N) -> sqlx::Result<T>
where
    T: TryFrom<N, Error: Error + Send + Sync + 'static>,
{
    T::try_from(stored)
        .map_err(|source| sqlx::Error::ColumnDecode { index: column.to_owned(), source: Box::new(source) })
}

/// Decodes a `json` column without parsing it.
pub(crate) fn json_text(row: &PgRow, column: &str) -> sqlx::Result<Option<JsonText>> {
    let text: Option<Json<Box<RawValue>>> = row.try_get(column)?;
    Ok(text.map(|Json(text)| JsonText::from_stored(text)))
}

/// Describes a row by its identifying columns, as in `agent_id=7 seq=12`, so that an operator finds it.
fn key_of(row: &PgRow) -> String {
    let mut key = String::new();
    let identifies = |name: &str| name.ends_with("_id") || matches!(name, "id" | "seq" | "name");
    for column in row.columns().iter().filter(|column| identifies(column.name())).take(MAX_KEY_COLUMNS) {
        let value = match row.try_get::<Option<i64>, _>(column.ordinal()) {
            Ok(number) => number.map(|number| number.to_string()),
            // A column of another type is left out: a second error must not replace the one that is being reported.
            Err(_) => row.try_get::<Option<String>, _>(column.ordinal()).unwrap_or(None),
        };
        if let Some(value) = value {
            let separator = if key.is_empty() { "" } else { " " };
            // Writing to a String does not fail.
            let _ = write!(key, "{separator}{}={value}", column.name());
        }
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negative_count_is_corrupt() {
        assert_eq!(to_count::<usize, i64>("content_bytes", 7).ok(), Some(7));
        let refused = to_count::<usize, i64>("content_bytes", -1);
        assert!(matches!(refused, Err(sqlx::Error::ColumnDecode { index, .. }) if index == "content_bytes"));
    }
}
